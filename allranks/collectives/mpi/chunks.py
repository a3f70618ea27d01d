"""How arrays pass between hosts in chunks, one between the hosts while the next one is laid out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from allranks.collectives.calls.call import Call
from allranks.collectives.calls.wait import LONGEST_SLEEP, SHORTEST_SLEEP, Steps
from allranks.collectives.host.desk import DONE
from allranks.collectives.host.memory import fence
from allranks.collectives.mpi.several import Several

T = TypeVar("T")
_AHEAD = 2
"""So many chunks are under way at most, as a rank has blocks."""


class Carry(NamedTuple):
    """What goes with an agreement in the rows of first ranks."""

    pack: Callable[[], int]
    """Writes what a host adds, and says how many bytes that is."""
    unpack: Callable[[], None]
    """Lays out what has come of all of them."""


class Chunks(NamedTuple):
    """What each rank does with a chunk, by its number."""

    many: int
    fill: Callable[[int], None]
    """Lays out this rank's part, where its first rank reads it."""
    post: Callable[[int], Steps[None]]
    """On a first rank: ends when it lies in the slot whose turn it is."""
    take: Callable[[int], None]
    """Reads it there."""


def overlaps(lengths: Sequence[int], low: int, high: int) -> Iterator[tuple[int, slice, slice]]:
    """Of pieces one after the other those that reach into ``low:high``: which, what of it, where.

    The last is counted from ``low``.
    """
    at = 0
    for index, length in enumerate(lengths):
        first, last = max(at, low), min(at + length, high)
        if first < last:
            yield index, slice(first - at, last - at), slice(first - low, last - low)
        at += length


def passed(several: Several, call: Call, chunks: Chunks, result: T) -> Steps[T]:
    """Ends with the result when all chunks have passed; the first one has been filled."""
    channel, words = several.channel, several.desk.words
    before = several.ticks
    several.ticks += chunks.many
    under_way: deque[Steps[None]] = deque()
    if several.is_first:
        call.longest_sleep = SHORTEST_SLEEP

    def advance() -> None:
        """On a first rank: takes what is between the hosts further, and tells what is there."""
        while under_way and next(under_way[0], None) is None:
            under_way.popleft()
            fence()
            words[DONE] = max(words[DONE], before) + 1
        for steps in list(under_way)[1:]:
            next(steps, None)

    def until(ready: Callable[[], bool]) -> Steps[None]:
        call.stage += 1
        while not ready():
            yield call
            advance()

    def reached(there: int) -> bool:
        return words[DONE] >= there

    for chunk in range(chunks.many + _AHEAD):
        if chunk >= _AHEAD:
            there = before + chunk - _AHEAD + 1
            yield from until(partial(reached, there))
            fence()
            chunks.take(chunk - _AHEAD)
        if chunk >= chunks.many:
            continue
        if chunk:
            chunks.fill(chunk)
            channel.count += 1
            fence()
            channel.show()
        if several.is_first:
            yield from until(channel.complete)
            fence()
            under_way.append(chunks.post(chunk))
            advance()
    call.longest_sleep = LONGEST_SLEEP
    return result
