"""keep: the variables that a process which replaces this rank starts with, in files.

A version is valid once every rank's file of it exists. A file is moved into place when it is
complete, so the last one makes the version valid for all ranks at once. The previous version is
removed only then: if a rank dies before, it is still there.

On several hosts a rank sees the files of its own host. There a version is valid once it is whole on
every host. All ranks know that at the next call, and remove the version before it only then. A rank
of another host stores a copy of each file, for the loss of a host.

The files are pickles, which may run any code. So only files of this user alone are read, in folders
of this user alone (`allranks.own_files`).
"""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks import own_files
from allranks.collectives import world
from allranks.collectives.calls.call import Call, Steps
from allranks.collectives.calls.specs import Spec
from allranks.collectives.ops import operations
from allranks.collectives.world.world import World
from allranks.errors import UsageError
from allranks.records import wire
from allranks.records.deferred import deferred
from allranks.records.ranks import copy_holders, label

_MEMORY = "/dev/shm/"
_SPARED_NBYTES = 64 << 20
"""Shared memory that is left free: a rank that writes to full shared memory ends by a signal."""
_WAITED_FOR_NBYTES = 1 << 20
"""Up to this size the call waits for the file: that takes less than a millisecond."""
_SENT_NBYTES = 64 << 20
"""Copies go to other hosts in pieces: MPI counts the bytes of a message in 31 bits."""


def keep(*names: str, **values: Any) -> None:
    """Keeps these variables as they are now: a process that replaces this rank starts with them.

    They are copied at once. Up to 1 MiB per rank is written before this returns, more in the
    background. The version before stays valid until all ranks have written the new one. So the
    kept variables of all ranks are always from the same call, whenever a rank dies.
    On several hosts, another host gets a copy of them before this returns.

    Args:
        *names: names of variables of the cells: ``keep("model", "step")``.
        **values: the same with their values: ``keep(model=model, step=step)``. Names must be the
            same on every rank; anything that can be pickled may be kept.

    Raises:
        UsageError: a variable does not exist or cannot be pickled, the ranks pass different
            names, the variables of the call before could not be written, or ranks are not replaced
            here. It is raised on all ranks.

    Collective over all ranks.
    """
    kept: VariableStore | None = world.current().variable_store
    if kept is None:
        raise UsageError(
            "keep() needs ranks of a notebook that are replaced when they die, which these are "
            "not. Save what you must not lose to a file."
        )

    def collect() -> dict[str, Any]:
        given: tuple[object, ...] = names
        for other in given:
            if isinstance(other, str):
                continue
            raise UsageError(
                f"keep() needs names of variables, found {type(other).__name__}. "
                "Type for example: keep('model'), or keep(model=model)"
            )
        missing = [name for name in names if name not in kept.namespace]
        if missing:
            raise UsageError(
                f"keep() needs variables of the cells: rank {kept.rank} has none named "
                f"{', '.join(missing)}. Type for example: keep({missing[0]}=1)"
            )
        found = {name: kept.namespace[name] for name in names} | values
        if not found:
            raise UsageError("keep() needs variables, found none. Type for example: keep('step')")
        return found

    keep_in(kept.of_cells, collect)


def keep_in(
    series: VersionedFiles, collect: Callable[[], dict[str, Any]], *, copy: bool = True
) -> None:
    """Makes the result of ``collect`` the next version. Collective over all ranks."""
    # Without ``copy`` the values must not change before the next call.
    this = world.current()
    problem, values, parts = series.settle(), {}, []
    copies = series.is_copied and len(set(this.hosts)) > 1
    if problem:
        problem = f"the last keep() kept nothing: rank {this.rank}: {problem}"
    else:
        try:
            values = collect()
            parts = snapshot(values, this.rank, copy=copy and not copies)
        except UsageError as error:
            problem = str(error)
    *_, nbytes = wire.lay_out(parts)
    own = (problem, tuple(sorted(values)), series.number, nbytes)
    told = this.run(operations.begin_object_gather(this.groups[0], "keep", own))
    for said, *_ in told:
        if said:
            series.failed = True
            raise UsageError(said)
    if len({names for _, names, *_ in told}) > 1:
        found = "; ".join(f"rank {r} has {', '.join(told[r][1])}" for r in range(this.size))
        raise UsageError(f"keep() needs the same names on {label(range(this.size))}: {found}")
    numbers = {number for _, _, number, _ in told}
    if len(numbers) == 1 and not series.failed:
        (series.valid,) = numbers
    series.failed = False
    files = {this.rank: pieces_of(parts)}
    if copies:
        whole = bytearray(nbytes)
        wire.fill(whole, parts)
        files = {this.rank: [(0, memoryview(whole))]}
        files |= _exchanged(this, np.frombuffer(whole, np.uint8), max(n for *_, n in told))
    series.write(1 + max(numbers), files)


Pieces = Sequence[tuple[int, memoryview]]
"""Where each part of a file begins, and its bytes."""


def pieces_of(parts: Sequence[memoryview | bytes]) -> Pieces:
    """The pieces of a file with these parts."""
    head, starts, _ = wire.lay_out(parts)
    views = [memoryview(part) for part in parts]
    return [(0, memoryview(head)), *zip(starts, views, strict=True)]


def _exchanged(this: World, data: NDArray[np.uint8], most_nbytes: int) -> dict[int, Pieces]:
    """Sends a copy to another host; returns those that come to this rank. Collective."""
    group, copies = this.groups[0], dict[int, list[tuple[int, memoryview]]]()
    holder = copy_holders(this.hosts)[this.rank]
    for at in range(0, most_nbytes, _SENT_NBYTES):
        part = data[at : at + _SENT_NBYTES]
        lengths = [part.nbytes if rank == holder else 0 for rank in range(this.size)]

        def steps(call: Call, part: Any = part, lengths: list[int] = lengths) -> Steps[Any]:
            return (yield from call.moved(group.choose(call).alltoall, part, lengths, -1))

        for rank, got in enumerate(this.run(group.call(Spec("keep"), None, part.nbytes, steps))):
            if got.nbytes:
                copies.setdefault(rank, []).append((at, memoryview(got)))
    return dict(copies)


class VersionedFiles:
    """The versions of one rank's variables; one is valid once all ranks' files of it exist."""

    def __init__(
        self, folders: Sequence[str], name: str, rank: int, size: int, here: LocalRanks | None
    ) -> None:
        self._folders, self._name = folders, name
        self._here = here
        self.rank, self._size = rank, size
        self._file = re.compile(rf"{name}-(\d+)-(\d+)-of-{size}")
        self._writing = threading.Lock()
        """Held while a file is written. Before Python 3.13, an interrupt in `Thread.join` makes a
        thread that runs count as ended.
        """
        self._problem = ""
        self.number = max(self._found(), default=0)
        """The last version that this rank has begun, or found."""
        self.valid = 0
        """On several hosts, the last version that is known to be whole on all of them."""
        self.failed = False
        """Whether the last call of `keep` has failed."""

    @property
    def is_copied(self) -> bool:
        """Whether another host stores copies."""
        return self._here is not None

    def wait(self) -> None:
        with self._writing:
            pass

    def settle(self) -> str:
        """Waits for the file under way; returns why the last version failed, or an empty string."""
        self.wait()
        problem, self._problem = self._problem, ""
        return problem

    def write(self, version: int, files: Mapping[int, Pieces]) -> None:
        """Writes files of a version, this rank's own and copies of others, in the background; waits
        for small ones.
        """
        self.number = version
        writing = threading.Lock()
        writing.acquire()
        writer = threading.Thread(
            target=self._write, args=(version, files, writing), name="allranks-keep", daemon=True
        )
        with deferred():  # else no call waits for a thread that has been started
            writer.start()
            self._writing = writing
        if sum(map(_nbytes, files.values())) <= _WAITED_FOR_NBYTES:
            self.wait()

    def newest(self) -> int:
        """The newest version of which all files are there, on several hosts those of this host."""
        ranks = set(range(self._size) if self._here is None else self._here())
        whole = (number for number, files in self._found().items() if ranks <= files.keys())
        return max(whole, default=0)

    def load(self, version: int | None = None) -> tuple[float, Any] | None:
        """The time and the value of this rank's part of a version, or of the newest one; None
        without one.
        """
        data = self.read(self.newest() if version is None else version)
        # May raise any exception of an object's own way to be unpickled.
        kept: tuple[float, Any] | None = None if data is None else wire.unpack(data)
        return kept

    def read(self, version: int) -> bytearray | None:
        """The file of this rank's part of a version; None without one."""
        found = self._found().get(version, {}).get(self.rank)
        if found is None:
            return None
        folder, name = found
        with (
            own_files.own_folder(folder) as place,
            open(own_files.open_file(name, place), "rb") as file,
        ):
            data = bytearray(os.fstat(file.fileno()).st_size)
            file.readinto(data)
        return data

    def drop(self) -> None:
        """Removes this rank's part of all versions: without it none is valid."""
        self.settle()
        for files in self._found().values():
            if self.rank in files:
                _remove(*files[self.rank])

    def _write(self, version: int, files: Mapping[int, Pieces], writing: threading.Lock) -> None:
        try:
            for rank, pieces in files.items():
                self._problem = self._write_file(version, rank, pieces)
                if self._problem:
                    break
            # Older versions go only once all ranks have written a newer one.
            newest = self.newest() if self._here is None else self.valid
            for number, files_of in self._found().items():
                for folder, name in files_of.values() if number < newest else ():
                    _remove(folder, name)
        finally:
            writing.release()

    def _write_file(self, version: int, rank: int, pieces: Pieces) -> str:
        # Returns why it could not be written, or "".
        problem = "no folder for it could be made"
        name = f"{self._name}-{version}-{rank}-of-{self._size}"
        for folder in self._with_room(_nbytes(pieces)):
            _remove(folder, f"{name}.part")  # of a rank that has died
            try:
                with own_files.own_folder(folder) as place:
                    with open(own_files.create_file(f"{name}.part", place), "wb") as file:
                        for start, part in pieces:
                            file.seek(start)
                            file.write(part)
                    # A file under its own name is complete, also if the rank dies now.
                    os.replace(f"{name}.part", name, src_dir_fd=place, dst_dir_fd=place)
            except OSError as error:
                problem = str(error)
                _remove(folder, f"{name}.part")
            else:
                return ""
        return problem

    def _with_room(self, nbytes: int) -> Iterator[str]:
        """The folders to try; those in memory only if all ranks' files fit."""
        for folder in self._folders:
            if folder.startswith(_MEMORY):
                with suppress(OSError):  # it is gone: the error of a file in it says so
                    found = os.statvfs(folder)
                    if found.f_bavail * found.f_frsize < nbytes * self._size + _SPARED_NBYTES:
                        continue
            yield folder

    def _found(self) -> dict[int, dict[int, tuple[str, str]]]:
        # The folder and the name of each file, by version and rank.
        found: dict[int, dict[int, tuple[str, str]]] = {}
        for folder in self._folders:
            for name in _names(folder):
                if match := self._file.fullmatch(name):
                    number, rank = map(int, match.groups())
                    found.setdefault(number, {})[rank] = folder, name
        return found


LocalRanks = Callable[[], Collection[int]]
"""Returns the ranks of this rank's host, where there are several hosts."""


class VariableStore:
    """The kept variables of one rank: those of its cells, and the state of a training."""

    def __init__(
        self,
        folders: Sequence[str],
        rank: int,
        size: int,
        namespace: Mapping[str, Any],
        name: str = "",
        here: LocalRanks | None = None,
    ) -> None:
        self.rank, self.namespace, self.folders = rank, namespace, folders
        self.of_cells = VersionedFiles(folders, f"{name}cells", rank, size, here)
        self.of_training = VersionedFiles(folders, f"{name}training", rank, size, here)
        self.of_life = VersionedFiles(folders, f"{name}life", rank, size, here)
        """All variables of a rank that is started again."""
        self._cut_off = False

    def drop(self) -> None:
        self.of_cells.drop()
        self.of_training.drop()

    def drop_others(self, prefix: str) -> None:
        """Removes the files of any rank whose names begin with ``prefix``."""
        for folder in self.folders:
            for name in _names(folder):
                if name.startswith(prefix):
                    _remove(folder, name)

    def cut_off(self) -> None:
        """A training has ended because a rank has left it; its next start continues it."""
        self._cut_off = True

    def settled(self) -> int:
        """Waits for the files; returns the version from which an interrupted training goes on."""
        self.of_cells.wait()
        self.of_training.wait()
        told, self._cut_off = self._cut_off, False
        return self.of_training.newest() if told else 0


def snapshot(values: dict[str, Any], rank: int, *, copy: bool) -> list[memoryview | bytes]:
    """The time and the values, pickled; `UsageError` if one cannot be. ``copy`` copies arrays."""
    try:
        return _packed((time.time(), values), copy)
    except Exception as error:  # an object's own way to be pickled may do anything
        name, why = next(_unpicklable(values), (", ".join(values), error))
    raise UsageError(
        f"keep() needs variables that can be pickled: {name} on rank {rank} cannot be "
        f"({type(why).__name__}: {why}). Leave it out, and keep what it is made from."
    )


def _packed(value: Any, copy: bool) -> list[memoryview | bytes]:
    from cloudpickle import dumps

    buffers: list[pickle.PickleBuffer] = []
    head = dumps(value, protocol=5, buffer_callback=buffers.append)
    return [head, *(bytes(raw) if copy else raw for raw in (b.raw() for b in buffers))]


def _unpicklable(values: dict[str, Any]) -> Iterator[tuple[str, Exception]]:
    for name, value in values.items():
        try:
            _packed(value, False)
        except Exception as error:  # as above
            yield name, error


def _nbytes(pieces: Pieces) -> int:
    return sum(part.nbytes for _, part in pieces)


def _names(folder: str) -> list[str]:
    try:
        with own_files.own_folder(folder) as place:
            return os.listdir(place)
    except OSError:
        return []  # removed by another process, or another user's


def _remove(folder: str, name: str) -> None:
    with suppress(OSError), own_files.own_folder(folder) as place:
        os.unlink(name, dir_fd=place)
