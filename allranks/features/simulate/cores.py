"""Computing of ranks that share the cores and the memory of their machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class _Work:
    """What a rank computes between two calls."""

    rank: int
    begins: float
    seconds: float
    """How long it takes on one rank alone."""
    left: float


class SharedCores:
    """Ranks of a machine that compute at once: each of them slows the others down.

    ``slowdown`` returns by how much, for the number of ranks that compute on a machine and the
    seconds that one of them computes. All ranks that can run have to run until they compute or
    wait; then `next_end` returns the first of those that compute.
    """

    def __init__(self, machines: Sequence[int], slowdown: Callable[[int, float], float]) -> None:
        self._machines, self._slowdown = machines, slowdown
        self._later: list[_Work] = []
        self._working: list[_Work] = []
        self._now = 0.0

    def add(self, rank: int, begins: float, seconds: float) -> None:
        """A rank computes from a simulated time on."""
        # A rank that polls may have waited until now, although its clock has not moved.
        self._later.append(_Work(rank, max(begins, self._now), seconds, seconds))

    def __bool__(self) -> bool:
        return bool(self._working or self._later)

    def next_end(self) -> tuple[int, float]:
        """Returns which rank's computing ends first, and when."""
        while True:
            start = min((work.begins for work in self._later), default=float("inf"))
            if not self._working:
                self._now = start
            ranks = Counter(self._machines[work.rank] for work in self._working)
            rates = [
                1 / self._slowdown(ranks[self._machines[work.rank]], work.seconds)
                for work in self._working
            ]
            ends = [work.left / rate for work, rate in zip(self._working, rates, strict=True)]
            first = min(range(len(ends)), key=ends.__getitem__, default=-1)
            ended = first >= 0 and self._now + ends[first] <= start
            passed = ends[first] if ended else start - self._now
            for work, rate in zip(self._working, rates, strict=True):
                work.left = max(0.0, work.left - passed * rate)
            self._now += passed
            if ended:
                return self._working.pop(first).rank, self._now
            self._working += [work for work in self._later if work.begins <= start]
            self._later = [work for work in self._later if work.begins > start]
