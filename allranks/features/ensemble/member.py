"""One member of an ensemble: its parameters, its state, and its result.

A rank leaves a large result in shared memory. The kernel of the system copies it from there to a
file without a name, which outlives the rank and takes none of the notebook's memory. It is deleted
with the last object that refers to it, also if this process is killed.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from allranks import own_files
from allranks.cluster.variables import reading
from allranks.errors import UsageError
from allranks.records.wire import unpack
from allranks.widgets.dashboard.curves import Curve
from allranks.widgets.dashboard.tables import number, seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_OURS = "/memfd:allranks"
OTHERS_CAN_WRITE = "that others can write"


class Arena:
    """A file without a name that grows with every result."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("allranks-results")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        self._end = 0
        weakref.finalize(self, os.close, self.fd)

    def put(self, packed: bytes | SharedResult) -> Place:
        os.lseek(self.fd, self._end, os.SEEK_SET)
        write(self.fd, packed)
        place = Place(self, self._end, len(packed))
        self._end += place.nbytes
        return place


@dataclass(frozen=True)
class Place:
    """A packed result in a file of a store, or in an arena, which exists as long as its results.

    ``trusted`` also unpickles another user's file.
    """

    where: Path | Arena
    start: int
    nbytes: int
    trusted: bool = False

    def load(self) -> Any:
        """Returns a new copy of the result.

        Raises OSError if the file does not exist, or another user can have written it.
        """
        if isinstance(self.where, Arena):
            return _load(self.where.fd, self.start, self.nbytes)
        with open(own_files.open_any_file(str(self.where)), "rb") as file:
            if distrusted(file.fileno()) and not self.trusted:
                problem = "is another user's by now, or others can write to it: not unpickled"
                raise PermissionError(f"{self.where} {problem}")
            return _load(file.fileno(), self.start, self.nbytes)


def distrusted(file: str | int) -> str:
    """Returns why another user could have put code into a file with a pickle; else "".

    ``file`` is a path or a descriptor.
    """
    found = os.fstat(file) if isinstance(file, int) else os.lstat(file)
    # Files of root are trusted.
    if found.st_uid not in (os.geteuid(), 0):
        return f"of user {found.st_uid}"
    return OTHERS_CAN_WRITE if own_files.others_can_write(found, file) else ""


class SharedResult:
    """``nbytes`` of shared memory on this host, with the packed result of a rank.

    Raises OSError if this process cannot open it.
    """

    def __init__(self, address: str, nbytes: int) -> None:
        # A rank in a container has another process id there, so the path may be another process's.
        if not os.readlink(address).startswith(_OURS):
            raise OSError(f"{address} is no shared memory of a rank")
        self.fd = os.open(address, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._nbytes = nbytes
        weakref.finalize(self, os.close, self.fd)
        own_files.check_owner(self.fd, address)

    def __len__(self) -> int:
        return self._nbytes


def write(fd: int, packed: bytes | SharedResult) -> None:
    if isinstance(packed, SharedResult):
        sent = 0
        while sent < len(packed):
            more = os.sendfile(fd, packed.fd, sent, len(packed) - sent)
            if not more:
                raise OSError("the shared memory of a rank has been cut short")
            sent += more
        return
    rest = memoryview(packed)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _load(fd: int, start: int, nbytes: int) -> Any:
    packed = bytearray(nbytes)
    at = 0
    while at < nbytes:
        # Not read(): results share one file, whose position belongs to `Arena.put`.
        more = os.preadv(fd, [memoryview(packed)[at:]], start + at)
        if not more:
            raise OSError("a result has been cut short")
        at += more
    return unpack(packed)


#: Points kept of each history; of longer ones, every second, fourth, … and the last.
_HISTORY_POINTS = 20_000

#: The states of a member.
WAITING, RUNNING, FINISHED, FAILED = "waiting", "running", "finished", "failed"
STOPPED, STOPPED_EARLY = "stopped", "stopped early"
#: A store keeps these, and a rerun does not run them again.
ENDED = (FINISHED, FAILED, STOPPED_EARLY)


class LoggedValues(NamedTuple):
    """The values of one name that a member logged: (points,) steps and values, float64."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]


@dataclass(eq=False)
class Member:
    """One member, as ``runs[3]``.

    Attributes:
        number: its place in the ensemble, from 0.
        values: its parameters.
        state: waiting, running, finished, failed, stopped, or stopped early.
        ranks: the ranks of its last or current run.
        seconds: its duration, or None.
        error: the reason of a failure, in one line; ``traceback`` is the whole report.
        text: its result in one line.
    """

    number: int
    values: dict[str, Any]
    state: str = WAITING
    ranks: tuple[int, ...] = ()
    seconds: float | None = None
    error: str = ""
    traceback: str = field(default="", repr=False)
    text: str = ""
    numbers: dict[str, float] = field(default_factory=dict, repr=False)
    deaths: int = field(default=0, repr=False)
    place: Place | None = field(default=None, repr=False)
    problem: str = field(default="", repr=False)
    series: dict[str, Curve] = field(default_factory=dict, repr=False)

    @property
    def label(self) -> str:
        """The parameters as a person types them: ``lr=0.1 seed=3``."""
        return " ".join(f"{name}={short(value)}" for name, value in self.values.items())

    @property
    def rank(self) -> int | None:
        """The first of its ranks; None before its first run."""
        return self.ranks[0] if self.ranks else None

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every logged name, and every number in its result."""
        return {name: series.last[1] for name, series in self.series.items()} | self.numbers

    @property
    def history(self) -> dict[str, LoggedValues]:
        """The logged values by name. A long curve has every second, fourth … value and the last."""
        import numpy as np

        return {
            name: LoggedValues(np.array(series.steps), np.array(series.values))
            for name, series in self.series.items()
        }

    @property
    def result(self) -> Any:
        """The value of ``result`` after the cell, fetched now; a new copy each time.

        None if the member has not finished, or has not set ``result``.

        Raises:
            UsageError: the result could not be sent, or cannot be read here.
        """
        if self.problem:
            raise UsageError(
                f"expected a result that can be sent and kept, found in member {self.number}: "
                f"{self.problem}. Leave arrays and plain values in it, such as model.get_weights()."
            )
        try:
            with reading(f"in member {self.number}"):
                return self.place.load() if self.place is not None else None
        except OSError as error:
            raise UsageError(
                f"the result of member {self.number} no longer exists: {error}. Run the cell again."
            ) from error

    def __reduce__(self) -> NoReturn:
        # Its result is in a file that ranks may not have. `Runs` has members, so this holds for it.
        raise UsageError(
            "the results of an ensemble's members are in the notebook. Use them there: where every "
            "cell runs on the ranks, begin the cell with: %%local   (or send a value, for example: "
            "best = runs.best().result)"
        )

    def log(self, name: str, steps: array[float], values: array[float]) -> None:
        if name not in self.series:
            self.series[name] = Curve(len(self.series))
        self.series[name].add(steps, values, _HISTORY_POINTS)

    def again(self) -> None:
        # Back to the state before its first run.
        self.become(Member(self.number, self.values))

    def become(self, other: Member) -> None:
        # The other member has the same values.
        for name in ("state", "ranks", "seconds", "error", "traceback", "text", "numbers", "place",
                     "problem", "series"):  # fmt: skip
            setattr(self, name, getattr(other, name))

    def __repr__(self) -> str:
        took = "" if self.seconds is None else f" in {seconds(self.seconds)}"
        where = "" if self.rank is None else f" on rank {self.rank}"
        told = ", ".join(f"{name} {number(value)}" for name, value in self.metrics.items())
        said = f": {self.error or told}" if self.error or told else ""
        return f"<member {self.number} ({self.label}) {self.state}{where}{took}{said}>"


def comparable(value: Any) -> float | int | str:
    """Returns a parameter's value as a table sorts it: a number, or a short text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A page has no whole numbers beyond these, and JSON none that are not finite.
    return value if is_number and abs(value) < 2**53 else short(value)


def short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return _shortened(value)
    shape = getattr(value, "shape", None)
    if shape:
        return f"<{type(value).__name__} {tuple(shape)}>"
    told = f"<{type(value).__name__}>"
    if isinstance(value, Mapping | list | tuple | int | None | type):
        try:
            return _shortened(getattr(value, "__name__", None) or repr(value))
        except Exception:  # the __repr__ of an element may raise
            return told
    return getattr(value, "__name__", told)


def _shortened(text: str) -> str:
    text = text if len(text) <= 40 else f"{text[:39]}…"
    # Line breaks and colours would break the table; a notebook cannot save half a character.
    return text if text.isprintable() else repr(text)[1:-1]
