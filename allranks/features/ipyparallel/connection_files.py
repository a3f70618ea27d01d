"""The files by which ipyparallel's clients find a cluster."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from allranks.cluster.cleanup import CleanupProcess
from allranks.cluster.ipython_profile import profile_folder
from allranks.errors import UsageError
from allranks.features.ipyparallel.metadata import NOTEBOOK

_SET_NAME = "allranks on "
#: Runs when the ranks have ended, or the kernel has died.
_REMOVE = 'rm -f "$@"'
_CLOSE_SECONDS = 10.0
_CONNECT_SECONDS = 1.0
#: Of the files for clients.
_NAMES = re.compile(r"ipcontroller(-allranks-\d+-\d+)?-client\.json")
_PROGRAMS = ("ipcluster", "ipcontroller", "ipyparallel.")


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


def client_file(profile: Path, name: str = "") -> Path:
    """Returns the file for clients of a cluster; without a name the one that they read if their
    user names no other.
    """
    return _paths(profile / "security", name)[0]


class NoConnectionFile(UsageError, OSError):
    """There is no such file; ipyparallel raises an OSError, and programs wait for files by it."""


def check_file(named: Path) -> None:
    """Raises NoConnectionFile if a file for clients that a user has named does not exist.

    It is removed at the end of its ranks, and those that start next may have another one.
    """
    path = named.absolute()
    if path.exists() or not _NAMES.fullmatch(path.name):
        return
    files = connection_files(path.parents[1]) if path.parent.name == "security" else {}
    first = (
        f"expected ranks at {path}, found no file: they have ended, or have yet to start. To start "
        "those of a notebook, type there: %distributed start   and make the client again"
    )
    raise NoConnectionFile("\n".join([first, *how_to_connect(files)]))


def how_to_connect(files: Mapping[Path, str]) -> list[str]:
    """Returns lines with what to type to use the clusters of these files for clients."""
    lines = [f"  ipp.Client({str(path)!r})  {what}" for path, what in files.items()]
    first = "Other notebooks of yours have ranks. To use those, type one of:"
    return [first, *lines] if lines else []


def own_notebook() -> str:
    """Returns the path of this notebook, which Jupyter Server sets; else a text with the folder."""
    return os.environ.get("JPY_SESSION_NAME") or f"a program in {os.getcwd()}"


def connection_files(profile: Path | None, *, only_here: bool = False) -> dict[Path, str]:
    """Returns the files for clients of the clusters of this user's notebooks, and what these are.

    A shared home also has those of other hosts, whose notebooks may have ended; not if only those
    on this host are asked for.
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
        if name.startswith(_SET_NAME) and (name == _set_name() or not only_here):
            where = "" if name == _set_name() else f" on {name.removeprefix(_SET_NAME)}"
            client = _paths(folder, path.stem.removeprefix("cluster-"))[0]
            found[client] = f"{size} ranks{where}{_of_notebook(client)}"
    return found


def _of_notebook(client: Path) -> str:
    try:
        return f" of {json.loads(client.read_text())[NOTEBOOK]}"
    except (OSError, ValueError, LookupError, TypeError):
        return ""  # of an older version, or removed just now


def may_answer(path: Path) -> bool:
    """Whether the controller of a file for clients may run; a killed one leaves its file."""
    try:
        found = json.loads(path.read_text())
        if found["location"] == socket.gethostname() and not found.get("ssh"):
            try_to_connect(found["interface"], found["registration"])
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except Exception:  # ipyparallel judges what is in it, and how to reach another host
        return True
    return True


def try_to_connect(interface: str, port: int) -> None:
    """Raises OSError if nothing listens at this port of an interface, as ``tcp://127.0.0.1``."""
    host = interface.removeprefix("tcp://").strip("[]")
    socket.create_connection((host, port), _CONNECT_SECONDS).close()


def a_cluster_may_start() -> bool:
    """Whether this user runs a program of ipyparallel here, whose files may come soon."""
    for process in psutil.process_iter(["uids", "cmdline"]):
        about = process.info
        if about["uids"] and about["uids"].real == os.getuid():
            # Such as "python /usr/bin/ipcluster start", or "python -m ipyparallel.cluster".
            words = (about["cmdline"] or [])[:3]
            if any(Path(word).name.startswith(_PROGRAMS) for word in words):
                return True
    return False


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
