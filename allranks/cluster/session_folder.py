"""The folder of a cluster's sockets, and of its launcher's own files."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path

import psutil

from allranks import own_files
from allranks.errors import UsageError
from allranks.records.config import NOTEBOOKS_DOOR

_SESSION = "allranks-session-"
_GRACE_SECONDS = 60.0
#: The path of a socket has at most 104 bytes (macOS) or 108; ours adds up to 45.
_LONGEST_NBYTES = 58
#: MPI cannot start with less, and does not say so.
_LEAST_NBYTES = 1 << 20


def name_session_folder(where: str = "") -> str:
    """Returns the unused path of a folder for sockets and the launcher's own files.

    Its name contains this process's id. The host agent makes it and removes it at the end, even if
    this process is killed; the folder of a killed agent is removed here. With several hosts each
    relay does so on its host. ``where`` is its parent, if that is the same on every host.

    Raises UsageError if there is no space.
    """
    place = _session_place(where)
    if not where and _is_full(place):
        raise UsageError(
            f"expected space for 1 MB in the temporary folder, found {place} full. Free some "
            "space, or name another folder: %env TMPDIR=/somewhere"
        )
    for folder in place.glob(f"{_SESSION}*"):
        owner = folder.name.removeprefix(_SESSION).partition("-")[0]
        # Those of others are theirs to remove, and may contain anything.
        if not own_files.is_own_folder(str(folder), others=0o077):
            continue
        try:
            old = time.time() - folder.stat().st_mtime > _GRACE_SECONDS
            gone = owner.isdecimal() and not psutil.pid_exists(int(owner))
            # Containers may share this folder but not their process ids: check the socket too.
            doors = folder / "host-agent", folder / NOTEBOOKS_DOOR
            if old and gone and not any(map(answers, doors)):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # another process has swept it
    return str(place / f"{_SESSION}{os.getpid()}-{secrets.token_hex(4)}")


def _session_place(where: str = "") -> Path:
    place = Path(where or tempfile.gettempdir())
    unfit = len(os.fsencode(place)) > _LONGEST_NBYTES or (not where and _is_full(place))
    # Other users could exchange the folder, and send the ranks cells by its sockets.
    unfit = unfit or bool(own_files.exposed_part(str(place)))
    return Path("/tmp") if unfit and os.access("/tmp", os.W_OK) else place


def _is_full(place: Path) -> bool:
    try:
        return shutil.disk_usage(place).free < _LEAST_NBYTES
    except OSError:
        return False  # the next steps say what is wrong with it


def session_folders() -> list[Path]:
    """Returns the folders of all clusters of this machine, of any user."""
    return sorted(_session_place().glob(f"{_SESSION}*"))


def answers(path: Path) -> bool:
    """Whether a process listens at a socket's path; does not wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.setblocking(False)
        try:
            visitor.connect(str(path))
        except BlockingIOError:
            return True  # it has not accepted others yet
        except OSError:
            return False
    return True
