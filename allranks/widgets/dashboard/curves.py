"""The values that ranks log: curves of bounded length, and a file that has every value."""

from __future__ import annotations

import math
import tempfile
import weakref
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from allranks.records.ranks import label
from allranks.records.telemetry import Points

#: Points of all curves together; each curve holds between these two numbers.
_POINTS = 120_000
_MOST, _LEAST = 2000, 200
#: More series than this are counted and not kept.
_SERIES = 1000
#: More than this goes to a file without a name, which ends with the kernel.
_IN_MEMORY_NBYTES = 1 << 20


class Key(NamedTuple):
    """The key of a curve: the logged name, the rank, and the member."""

    name: str
    rank: int
    member: str


def parts(record: Points, payload: bytes) -> Iterator[tuple[str, str, array[float], array[float]]]:
    """Yields the name, the member, the steps and the values of each series of a record."""
    pairs = array("d", payload)
    at = 0
    for name, member, count in record.series:
        end = at + 2 * count
        yield name, member, pairs[at:end:2], pairs[at + 1 : end : 2]
        at = end


class Logged:
    """The values of one cell, in the order in which they came."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_NBYTES)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._numbers: dict[Key, int] = {}
        self._batches = array("q")
        self._begins: dict[int, int] = {}
        #: How many values the disk had no room for.
        self.missing = 0

    def add(self, key: Key, steps: array[float], values: array[float]) -> None:
        end = self._file.tell()
        try:
            self._file.write(steps.tobytes() + values.tobytes())
        except OSError:  # the cell goes on, and the export names the index
            self._file.seek(end)
            self.missing += len(steps)
            return
        index = self._numbers.setdefault(key, len(self._numbers))
        self._batches.extend((index, len(steps)))

    def forget(self, rank: int) -> None:
        # A rank, or member, begins anew.
        for key, index in self._numbers.items():
            if key.rank == rank:
                self._begins[index] = len(self._batches)

    def read(self) -> dict[Key, tuple[array[float], array[float]]]:
        found = [(array("d"), array("d")) for _ in self._numbers]
        self._file.seek(0)
        for at in range(0, len(self._batches), 2):
            index, count = self._batches[at : at + 2]
            steps, values = self._file.read(8 * count), self._file.read(8 * count)
            if at >= self._begins.get(index, 0):
                found[index][0].frombytes(steps)
                found[index][1].frombytes(values)
        return dict(zip(self._numbers, found, strict=True))


@dataclass
class Curve:
    """One curve, of whose values every ``stride``-th is kept, and the last one."""

    number: int
    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    stride: int = 1
    seen: int = 0
    last: tuple[float, float] = (0.0, 0.0)
    sent: int = 0
    thinned: bool = False
    changed: bool = False
    #: The first value that is infinite or not a number, with its step.
    broken: tuple[float, float] | None = None

    def add(self, steps: array[float], values: array[float], most: int) -> None:
        if self.broken is None and not math.isfinite(sum(values)):
            pairs = zip(steps, values, strict=True)
            self.broken = next((one for one in pairs if not math.isfinite(one[1])), None)
        first = -self.seen % self.stride
        self.steps.extend(steps[first :: self.stride])
        self.values.extend(values[first :: self.stride])
        self.seen += len(steps)
        self.last = steps[-1], values[-1]
        self.changed = True
        while len(self.steps) > most:
            self.steps, self.values = self.steps[::2], self.values[::2]
            self.stride *= 2
            self.thinned = True

    def points(self, start: int = 0) -> array[float]:
        # Step and value by turns, then the last value.
        pairs = array("d", bytes(16 * (len(self.steps) - start + 1)))
        pairs[:-2:2], pairs[1:-2:2] = self.steps[start:], self.values[start:]
        pairs[-2], pairs[-1] = self.last
        return pairs


class Curves:
    """All curves of one cell. ``logged`` gets every value, also those that no curve keeps."""

    def __init__(self, logged: Logged | None = None) -> None:
        self._logged = logged
        self.series: dict[Key, Curve] = {}
        self._of_rank: dict[int, list[Curve]] = {}
        self.dropped: dict[int, int] = {}
        self.unkept = 0

    def __bool__(self) -> bool:
        return bool(self.series)

    @property
    def names(self) -> list[str]:
        # In the order in which they were first logged.
        return list(dict.fromkeys(key.name for key in self.series))

    def of(self, name: str) -> dict[Key, Curve]:
        found = [(key, series) for key, series in self.series.items() if key.name == name]
        return dict(sorted(found, key=lambda pair: pair[0]))

    def numbers(self) -> dict[tuple[int, str], int]:
        # A number for each rank and member: all its curves have one colour, that of the rank.
        owners = sorted({(key.rank, key.member) for key in self.series})
        alone = not any(member for _, member in owners)
        return {owner: owner[0] if alone else number for number, owner in enumerate(owners)}

    def forget(self, rank: int) -> None:
        # A rank, or member, begins anew.
        for key, series in self.series.items():
            if key.rank == rank:
                series.steps, series.values = array("d"), array("d")
                series.stride, series.seen, series.thinned = 1, 0, True
                series.broken = None
        if self._logged is not None:
            self._logged.forget(rank)

    def broken(self, name: str, noun: str) -> str:
        """Returns which curves of a name have infinite values or NaN, and since which step."""
        found: dict[str, list[int]] = {}
        for key, series in self.of(name).items():
            if series.broken is not None:
                step, value = series.broken
                found.setdefault(f"{value:g} at step {step:g}", []).append(key.rank)
        return "; ".join(f"{label(who, noun)}: {what}" for what, who in found.items())

    def coinciding(self, name: str) -> int:
        # How many curves of a name are equal; 0 if they are not.
        first, *others = self.of(name).values()
        same = all(
            (one.steps, one.values, one.last) == (first.steps, first.values, first.last)
            for one in others
        )
        return 1 + len(others) if others and same else 0

    def step(self, rank: int) -> float | None:
        # The last step that a rank logged.
        return max((series.last[0] for series in self._of_rank.get(rank, ())), default=None)

    def take(self, record: Points, payload: bytes) -> None:
        if record.dropped:
            self.dropped[record.rank] = record.dropped
        for name, member, steps, values in parts(record, payload):
            self.add(Key(name, record.rank, member), steps, values)

    def add(self, key: Key, steps: array[float], values: array[float]) -> None:
        if self._logged is not None:
            self._logged.add(key, steps, values)
        series = self.series.get(key)
        if series is None:
            if len(self.series) >= _SERIES:
                self.unkept += len(steps)
                return
            series = self.series[key] = Curve(len(self.series))
            self._of_rank.setdefault(key.rank, []).append(series)
        series.add(steps, values, max(_LEAST, min(_MOST, _POINTS // len(self.series))))

    def news(self) -> tuple[list[dict[str, Any]], bytes]:
        """Returns what has changed: a head of each series, and its new points and last value.

        With ``anew`` they replace what was sent before.
        """
        return self._told([(k, s) for k, s in self.series.items() if s.changed], anew=False)

    def everything(self) -> tuple[list[dict[str, Any]], bytes]:
        # All points in the same form; they count as sent.
        return self._told(list(self.series.items()), anew=True)

    def _told(
        self, chosen: list[tuple[Key, Curve]], anew: bool
    ) -> tuple[list[dict[str, Any]], bytes]:
        heads: list[dict[str, Any]] = []
        parts = []
        for key, series in chosen:
            again = anew or series.thinned
            start = 0 if again else series.sent
            name, rank, member = key
            head = {"number": series.number, "name": name, "rank": rank, "member": member}
            head["stride"] = series.stride
            if series.broken is not None:
                head["broken"] = [series.broken[0], str(series.broken[1])]  # JSON has no NaN
            heads.append({**head, "count": len(series.steps) - start, "anew": again})
            parts.append(series.points(start).tobytes())
            series.sent, series.thinned, series.changed = len(series.steps), False, False
        return heads, b"".join(parts)
