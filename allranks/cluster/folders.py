"""The files of a cluster: logs, sockets, and the files for ipyparallel's tools."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import psutil

from allranks import own_files
from allranks.errors import UsageError
from allranks.records.config import MPI_FILES, NOTEBOOKS_DOOR

_waiting: WeakSet[CleanupProcess] = WeakSet()


class CleanupProcess:
    """A shell that waits for `close` or the end of this process, then runs ``script``."""

    def __init__(self, script: str, *words: str) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f"read -r _; {script}", "sh", *words],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # A session of its own: an interrupt goes to the kernel's whole process group.
            start_new_session=True,
        )
        _waiting.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self, seconds: float) -> None:
        """Runs the command now, and waits for its end; from any thread, more than once."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # the shell has ended, or its script runs
            # A line ends the wait even if a process forked without Python holds the pipe open.
            self._process.stdin.write(b"\n")
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def _close_pipes() -> None:
    """Runs in a forked process: only the notebook's own end may keep the pipe open."""
    for keeper in list(_waiting):
        assert keeper._process.stdin is not None
        keeper._process.stdin.close()


# A program that is started does not inherit the pipe; a forked process does.
os.register_at_fork(after_in_child=_close_pipes)

#: Names another folder for the logs.
FOLDER = "ALLRANKS_LOG_DIR"
_SESSION = "allranks-session-"
_GRACE_SECONDS = 60.0
#: The path of a socket has at most 104 bytes (macOS) or 108; ours adds up to 45.
_LONGEST_NBYTES = 58
#: MPI cannot start with less, and does not say so.
_LEAST_NBYTES = 1 << 20


def make_log_folder() -> str:
    """Returns a new folder, mode 0700, for the logs of one cluster.

    It lies under ``$ALLRANKS_LOG_DIR``, else ``~/.local/state/allranks``, or the temporary folder
    if the home is read-only. A place in which other users can exchange folders is left out. Logs
    older than seven days are removed.
    """
    for place in filter(None, [os.environ.get(FOLDER), state_folder()]):
        try:
            # Once: a link on the way could lead elsewhere later.
            real = os.path.realpath(place)
            if own_files.exposed_part(place) or own_files.exposed_part(real):
                continue
            own_files.make_folders(real)
            # Again: another user could have been faster.
            if own_files.exposed_part(real):
                continue
            return _new_logs(real)
        except OSError:
            continue
    return _new_logs(own_files.temporary_folder("logs"))


def _new_logs(place: str) -> str:
    own_files.remove_old_logs(place)
    return tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=place)


def refused_log_folder() -> str:
    """Returns why the usual folder of the logs is not used, in one line; "" if it is."""
    named, state = os.environ.get(FOLDER, ""), state_folder()
    exposed, there = _exposed(named or state), _exposed(state)
    if not exposed:
        return ""
    return (
        f"The logs are not in {f'{FOLDER}={named}' if named else state}, because other users can "
        f"write to {exposed}. They are in {'the temporary folder' if there else state}"
    )


def _exposed(place: str) -> str:
    try:
        return own_files.exposed_part(place)
    except OSError:  # this user cannot look there: the logs are elsewhere
        return ""


def state_folder() -> str:
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(
        os.path.expanduser("~"), ".local/state"
    )
    return os.path.join(state, "allranks")


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


def profile_folder() -> Path | None:
    """Returns the folder of IPython's profile: this notebook's, else the default one.

    None if there can be none: IPython would make a new temporary folder for each call.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and shell.profile_dir is not None:
        return Path(shell.profile_dir.location)
    place = Path(os.path.expanduser(os.environ.get("IPYTHONDIR", "~/.ipython")))
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        return None
    from IPython.paths import get_ipython_dir

    return Path(get_ipython_dir(), "profile_default")


_KEPT = "allranks-kept-"
_MEMORY = "/dev/shm"


class KeptFolders:
    """A folder in memory, if possible, and one on disk; both mode 0700.

    The host agent makes them; on several hosts each makes its own, and removes them at its end.
    They are removed by :meth:`close`, by garbage collection, when the kernel exits, and by the
    agent if the kernel is killed or nothing was kept. The next kernel removes the folders of a
    kernel that was killed when it had no agent.
    """

    def __init__(self, paths: Sequence[str] = (), on_several_hosts: bool = False) -> None:
        name = f"{_KEPT}{secrets.token_hex(8)}"
        places = dict.fromkeys((_MEMORY, "/tmp" if on_several_hosts else tempfile.gettempdir()))
        for place in places:
            _sweep_unlocked(Path(place), _KEPT)
        _sweep_unlocked(Path(_MEMORY), MPI_FILES)
        self.paths = tuple(paths) or tuple(os.path.join(place, name) for place in places)
        self._held: list[int] = []
        self.close = weakref.finalize(self, _end_kept, self.paths, self._held)

    def hold(self) -> None:
        # The lock keeps other kernels from removing the folders, which exist by now.
        _let_go(self._held)
        for path in self.paths:
            with suppress(OSError):  # no files can be made there, or it is another user's
                self._held.append(own_files.open_folder(path))
                fcntl.flock(self._held[-1], fcntl.LOCK_SH)

    @property
    def have_files(self) -> bool:
        """Whether ranks of this host have kept anything in the folders that are held.

        The agent has removed empty folders, and any account can take their names then.
        """
        return any(os.listdir(folder) for folder in self._held)

    def stay(self, stays: bool) -> None:
        """Sets whether they stay, with the ranks, when the kernel exits."""
        self.close.atexit = not stays

    def let_go(self) -> None:
        self.close.detach()
        _let_go(self._held)


def _end_kept(paths: Sequence[str], held: list[int]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    _let_go(held)


def _let_go(held: list[int]) -> None:
    while held:
        os.close(held.pop())


def _sweep_unlocked(place: Path, name: str) -> None:
    for folder in place.glob(f"{name}*"):
        try:
            descriptor = own_files.open_folder(str(folder))
            try:
                # A new folder may not be locked yet.
                if time.time() - os.fstat(descriptor).st_mtime > _GRACE_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
        except OSError:
            continue  # a process holds it, or it is another user's


_SET_NAME = "allranks on "
#: Runs when the ranks have ended, or the kernel has died.
_REMOVE = 'rm -f "$@"'
_CLOSE_SECONDS = 10.0


class ConnectionFiles:
    """The files by which ipyparallel's clients find one cluster."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._profile = profile_folder()
        self._keeper: CleanupProcess | None = None

    def write(self, client: Any, engine: Any, pid: int | None) -> None:
        """Writes the files if there is a profile; all engines are registered.

        ``pid`` is the process whose end ends the ranks, if it is on this host.
        """
        if self._profile is None:
            return
        folder = self._profile / "security"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep_files(folder)
        # The empty name is the default of clients.
        names = itertools.chain([""], (f"allranks-{os.getpid()}-{n}" for n in itertools.count(1)))
        name = next(name for name in names if _take(folder, name, client))
        paths = _paths(folder, name)
        try:
            keeper = self._keeper = CleanupProcess(_REMOVE, *map(str, paths))
        except OSError:
            paths[0].unlink()
            raise
        _write(paths[1], engine)
        # Last, because with this file the cluster counts as running.
        _write(paths[2], _cluster(name, self._profile, self._size, pid or keeper.pid))

    def close(self) -> None:
        """Removes the files; from any thread, and more than once."""
        if self._keeper is not None:
            self._keeper.close(_CLOSE_SECONDS)


#: The file that clients take if nobody names another one.
CLIENT_FILE = "ipcontroller-client.json"


def connection_files(profile: Path | None) -> dict[Path, str]:
    """Returns the files for clients of the clusters of this user's notebooks, and their sizes.

    A shared home also has those of other hosts, whose notebooks may have ended.
    """
    found: dict[Path, str] = {}
    if profile is None:
        return found
    folder = profile / "security"
    _sweep_files(folder)
    for path in sorted(folder.glob("cluster-*.json")):
        try:
            ((name, engines),) = json.loads(path.read_text())["engines"]["sets"].items()
            size = engines["n"]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # not one of ours, or removed just now
        if name.startswith(_SET_NAME):
            where = "" if name == _set_name() else f" on {name.removeprefix(_SET_NAME)}"
            client = _paths(folder, path.stem.removeprefix("cluster-"))[0]
            found[client] = f"{size} ranks{where}"
    return found


def _paths(folder: Path, name: str) -> tuple[Path, Path, Path]:
    controller = f"ipcontroller-{name}-" if name else "ipcontroller-"
    client, engine = (folder / f"{controller}{kind}.json" for kind in ("client", "engine"))
    return client, engine, folder / f"cluster-{name}.json"


def _take(folder: Path, name: str, client: Any) -> bool:
    if any(path.exists() for path in _paths(folder, name)):
        return False
    try:
        _write(_paths(folder, name)[0], client)
    except FileExistsError:
        return False
    return True


def _write(path: Path, content: Any) -> None:
    """Writes a file for this user alone; it is complete as soon as it exists.

    Raises FileExistsError if it exists.
    """
    descriptor, part = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        os.link(part, path)  # unlike a rename, a link fails if the name is taken
    finally:
        os.unlink(part)


def _cluster(name: str, place: Path, size: int, pid: int) -> dict[str, Any]:
    """Returns what ``ipcluster`` would have written."""
    process = {
        "cluster_id": name,
        "profile_dir": str(place),
        "state": "running",
        "pid": pid,
        "output_file": "",
    }
    about = {"cluster_id": name, "profile_dir": str(place), "n": size, "controller_args": []}
    about |= {"controller_ip": "", "controller_location": "", "delay": 1.0}
    return {
        "cluster": about | {"class": "ipyparallel.cluster.cluster.Cluster"},
        "controller": {"class": "local", "state": process},
        "engines": {"class": "mpi", "sets": {_set_name(): process | {"n": size}}},
    }


def _set_name() -> str:
    """Returns the name of our clusters on this host: process ids are this host's."""
    return f"{_SET_NAME}{socket.gethostname()}"


def _sweep_files(folder: Path) -> None:
    for path in folder.glob("cluster-*.json"):
        try:
            found = json.loads(path.read_text())["engines"]["sets"][_set_name()]
            left = not psutil.pid_exists(found["pid"])
        except Exception:  # another program's file with any content, or removed just now
            continue
        for old in _paths(folder, path.stem.removeprefix("cluster-")) if left else ():
            old.unlink(missing_ok=True)
