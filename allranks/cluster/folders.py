"""The folders of a cluster: its logs, which stay a while, and its session, which goes with it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

import psutil

#: Names another folder for the logs.
FOLDER = "ALLRANKS_LOG_DIR"
_KEPT_DAYS = 7
_LOGS_OF_ONE = re.compile(r"\d{8}-\d{6}-\w+")
_SESSION = "allranks-session-"
_GRACE_SECONDS = 60.0
#: The path of a socket has at most 104 bytes (macOS) or 108; ours adds up to 45.
_LONGEST_NBYTES = 58


def make_log_folder() -> str:
    """Returns a new folder, mode 0700, for the logs of one cluster.

    It lies under ``$ALLRANKS_LOG_DIR``, else ``~/.local/state/allranks``, else, where the home is
    read-only, the temporary folder. Logs of more than seven days ago are removed.
    """
    places = [os.environ.get(FOLDER, ""), state_folder()]
    places.append(os.path.join(tempfile.gettempdir(), f"allranks-logs-{os.getuid()}"))
    for place in filter(None, places):
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            if place == places[-1]:
                _check_own(place)
            _sweep_logs(Path(place))
            return tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=place)
        except OSError:
            continue
    return tempfile.mkdtemp(prefix="allranks-logs-")


def state_folder() -> str:
    """Returns where the logs of this user lie, where nothing else is said."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(
        os.path.expanduser("~"), ".local/state"
    )
    return os.path.join(state, "allranks")


def _check_own(place: str) -> None:
    """Raises unless a folder is this user's alone: its name is known to all who may make one.

    Raises:
        PermissionError: it is another user's, a link, or others may write to it.
    """
    found = os.lstat(place)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{place} was not made by this user")


def _sweep_logs(place: Path) -> None:
    oldest = time.time() - _KEPT_DAYS * 86400
    for folder in place.iterdir():
        try:
            # The folder may have been named by the user, and hold other things as well.
            if not _LOGS_OF_ONE.fullmatch(folder.name):
                continue
            newest = max((f.stat().st_mtime for f in folder.iterdir()), default=0.0)
            if max(newest, folder.stat().st_mtime) < oldest:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def name_session_folder(where: str = "") -> str:
    """Returns the path of a folder that is not there, for sockets and the launcher's own files.

    Its name has this process's id in it. The nursery makes it and removes it at the end, whatever
    becomes of this process; what a nursery that was killed has left is removed here. With several
    hosts their relays do so, each on its own.

    Args:
        where: the folder that it is to lie in, where that is the same on every host.
    """
    place = _session_place(where)
    for folder in place.glob(f"{_SESSION}*"):
        owner = folder.name.removeprefix(_SESSION).partition("-")[0]
        try:
            old = time.time() - folder.stat().st_mtime > _GRACE_SECONDS
            gone = owner.isdecimal() and not psutil.pid_exists(int(owner))
            # Containers may share this folder, and not their process ids: nobody must be at home.
            if old and gone and not _answers(folder / "nursery"):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # another process has swept it, or it is another user's
    return str(place / f"{_SESSION}{os.getpid()}-{secrets.token_hex(4)}")


def _session_place(where: str = "") -> Path:
    place = Path(where or tempfile.gettempdir())
    if len(os.fsencode(place)) > _LONGEST_NBYTES and os.access("/tmp", os.W_OK):
        return Path("/tmp")
    return place


def session_folders() -> list[Path]:
    """Returns the folders of all clusters of this machine, those of other users among them."""
    return sorted(_session_place().glob(f"{_SESSION}*"))


def _answers(path: Path) -> bool:
    """Whether a process listens on a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        try:
            visitor.connect(str(path))
        except OSError:
            return False
    return True
