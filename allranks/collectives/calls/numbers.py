"""Numbers of what a rank brings to its sums and averages of floats.

Once a NaN is spread it cannot be found out which rank has brought it. So the first, the middle and
the last number of each array are looked at before it moves: 0.3 µs. Few calls, the same on all
ranks, also have a checksum of 64 numbers, by which the ranks' arrays can be compared: 2 µs.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array, ReduceOp
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.rank_state import RankState
from allranks.collectives.calls.specs import Packed
from allranks.errors import NotFinite

#: The gradients of a first model are a few dozen numbers. Smaller calls reduce flags and values.
LEAST_NBYTES = 256
#: The calls with a checksum: the first ones of a cell, then each 64th. More find no other cause.
_FIRST, _STRIDE, _MOST = 64, 64, 512
_SAMPLED = 64


class Brought(NamedTuple):
    """What a rank brought to a call.

    ``call`` counts those of a group in a cell. ``varied`` is whether the numbers differ from each
    other.
    """

    group: int
    call: int
    nbytes: int
    checksum: int
    varied: bool


class LookedAt:
    """The calls of a group that were looked at: how many, and the next one to look at closer."""

    __slots__ = ("due", "number")

    def __init__(self) -> None:
        self.number = self.due = 0


class NotFiniteCalls:
    """Calls of one kind, one after the other, to which the rank brought NaN or infinity."""

    def __init__(self, call: Call, number: int) -> None:
        self.group, self.call, self.at = call.members.number, number, call.started
        self.op, self.name, self.site, self.nbytes = call.spec.op, call.name, call.site, call.nbytes
        self.count = 0


class InputNumbers:
    """The numbers of one cell. With ``every``, all numbers of all calls have to be finite."""

    def __init__(self, every: bool = False) -> None:
        self.every = every
        self.brought: list[Brought] = []
        self.not_finite: dict[Packed, NotFiniteCalls] = {}
        self.groups: dict[int, LookedAt] = defaultdict(LookedAt)

    def look_at(self, call: Call, source: Array, calls: LookedAt) -> None:
        """Looks at a call that has NaN or infinity, or whose number is chosen."""
        if self.every:
            _check(call, source)
        number = calls.number
        if call.nbytes >= LEAST_NBYTES:
            self._look_closer(call, source, number)
            if (number <= _FIRST or number % _STRIDE == 0) and len(self.brought) < _MOST:
                self._add_checksum(call, source, number)
        after = number + 1 if number < _FIRST else number - number % _STRIDE + _STRIDE
        # Of NaN it is also noted whether it stays.
        calls.due = 0 if self.every or self.not_finite else after

    def _add_checksum(self, call: Call, source: Array, number: int) -> None:
        # Of all orders in memory, in the same order, without a copy of the whole.
        some = source.flat[:: -(-source.size // _SAMPLED)]
        data = some.tobytes()
        varied = data != data[: some.itemsize] * some.size
        group = call.members.number
        self.brought.append(Brought(group, number, call.nbytes, zlib.crc32(data), varied))

    def _look_closer(self, call: Call, source: Array, number: int) -> None:
        at = (0, source.size >> 1, source.size - 1)
        if all(math.isfinite(source.item(one)) for one in at):
            self.not_finite.pop(call.packed, None)
            return
        found = self.not_finite.get(call.packed)
        if found is None:
            found = self.not_finite[call.packed] = NotFiniteCalls(call, number)
        found.count += 1


def _check(call: Call, source: Array) -> None:
    finite = np.isfinite(source)
    if finite.all():
        return
    wrong = np.argwhere(~finite)
    first = tuple(map(int, wrong[0]))
    at = f", the first at {first}" if first else ""
    raise NotFinite(
        f"{call.spec.op} at {call.site} expected finite numbers, found {source[first]} in "
        f"{len(wrong):,} of {source.size:,} places{at}. No data was moved. Look at the batch of "
        "this rank, the learning rate, divisions and logarithms."
    )


def is_looked_at(own: RankState, op: ReduceOp, dtype: Any, nbytes: int) -> bool:
    """Whether calls of a kind are looked at."""
    every = own.numbers is not None and own.numbers.every
    # Infinity is a usual beginning of a minimum.
    large = nbytes >= (1 if every else LEAST_NBYTES)
    # Numbers of Python are computed with, which do not warn: those of longdouble would.
    is_float = dtype.kind == "f" and dtype.itemsize <= 8
    return is_float and large and op.name in ("Sum", "Average")


def looking(own: RankState, group: int, move: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a transport's move of an array that looks at its numbers first."""
    # Of the cell before: a look into the dictionary takes 0.25 µs after 1 MB has passed the caches.
    last: InputNumbers | None = None
    calls = LookedAt()

    # Most calls end here: a method for all of it would take 0.1 µs more, and so would options.
    def look(call: Call, source: Array, reduction: Arithmetic, out: Array | None = None) -> Any:
        nonlocal last, calls
        numbers: InputNumbers | None = own.numbers
        if numbers is not None:
            if numbers is not last:
                last, calls = numbers, numbers.groups[group]
            number = calls.number = calls.number + 1
            item = source.item
            total = item(0) + item(source.size >> 1) + item(-1)
            # NaN, also for infinity. The sum of large numbers may be infinite, too.
            if total - total or number >= calls.due:
                numbers.look_at(call, source, calls)
        return move(call, source, reduction, out)

    return look
