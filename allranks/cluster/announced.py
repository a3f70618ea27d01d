"""The files by which ipyparallel's own tools find the ranks, as if ``ipcluster`` had started them.

``ipp.Client()``, ``ipp.Cluster.from_file()`` and ``ipcluster list`` look into a folder of the
profile. Where another cluster is found there already, these files have a name of their own.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from allranks.cluster import profile
from allranks.cluster.keeper import Keeper

_SET = "allranks on "
#: When the ranks have ended, or the kernel has died.
_REMOVE = 'rm -f "$@"'
_CLOSE_SECONDS = 10.0


class Announced:
    """The files of one cluster.

    Args:
        size: how many ranks it has.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._profile = profile.folder()
        self._keeper: Keeper | None = None

    def write(self, client: Any, engine: Any, pid: int | None) -> None:
        """Writes them, where there is a profile: all engines are registered.

        Args:
            client: ipyparallel's connection information for clients.
            engine: that for engines.
            pid: the process that ends the ranks when it is told to end, if that is on this host.

        Raises:
            OSError: the folder cannot be written to.
        """
        if self._profile is None:
            return
        folder = self._profile / "security"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(folder)
        name = next(name for name in _names() if _take(folder, name, client))
        paths = _paths(folder, name)
        try:
            keeper = self._keeper = Keeper(_REMOVE, *map(str, paths))
        except OSError:
            paths[0].unlink()
            raise
        _write(paths[1], engine)
        _write(paths[2], _cluster(name, self._profile, self._size, pid or keeper.pid))

    def close(self) -> None:
        """Removes them; from any thread, and more than once."""
        if self._keeper is not None:
            self._keeper.close(_CLOSE_SECONDS)


def of_notebooks() -> list[tuple[Path, int]]:
    """Returns the file and the size of each cluster of this user's notebooks on this host."""
    place = profile.folder()
    found = []
    if place is not None:
        folder = place / "security"
        _sweep(folder)
        for path in sorted(folder.glob("cluster-*.json")):
            try:
                size = json.loads(path.read_text())["engines"]["sets"][_set_name()]["n"]
            except (OSError, ValueError, LookupError, TypeError):
                continue  # not one of ours, or removed just now
            found.append((_paths(folder, path.stem.removeprefix("cluster-"))[0], size))
    return found


def _names() -> Iterator[str]:
    """What a cluster may be called: nothing at all, which is what everybody asks for, or more."""
    yield ""
    yield from (f"allranks-{os.getpid()}-{number}" for number in count(1))


def _paths(folder: Path, name: str) -> tuple[Path, Path, Path]:
    """Returns where clients, engines and ipcluster look for a cluster of that name."""
    controller = f"ipcontroller-{name}-" if name else "ipcontroller-"
    client, engine = (folder / f"{controller}{kind}.json" for kind in ("client", "engine"))
    return client, engine, folder / f"cluster-{name}.json"


def _take(folder: Path, name: str, client: Any) -> bool:
    """Returns whether a name was free, and is taken now."""
    if any(path.exists() for path in _paths(folder, name)):
        return False
    try:
        _write(_paths(folder, name)[0], client)
    except FileExistsError:
        return False
    return True


def _write(path: Path, content: Any) -> None:
    """Writes a file that is whole as soon as it is there, for this user alone.

    Raises:
        FileExistsError: there is one already.
    """
    descriptor, part = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        os.link(part, path)  # a rename would take the place of another's
    finally:
        os.unlink(part)


def _cluster(name: str, place: Path, size: int, pid: int) -> dict[str, Any]:
    """Returns what ``ipcluster`` would have written down."""
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
    """Returns what tells our clusters, and those of this host: another has other processes."""
    return f"{_SET}{socket.gethostname()}"


def _sweep(folder: Path) -> None:
    """Removes what clusters of this host have left whose kernel was killed, and all with it."""
    for path in folder.glob("cluster-*.json"):
        try:
            found = json.loads(path.read_text())["engines"]["sets"][_set_name()]
            left = not psutil.pid_exists(found["pid"])
        except Exception:  # another's, who may write there what he likes, or removed just now
            continue
        for old in _paths(folder, path.stem.removeprefix("cluster-")) if left else ():
            old.unlink(missing_ok=True)
