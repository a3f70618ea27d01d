"""Sums of a rank's calls by op, name and size, made beside the calls."""

from __future__ import annotations

from time import perf_counter

from allranks.collectives import world
from allranks.collectives.calls.journal import Journal, named
from allranks.collectives.timings.spans import Spans
from allranks.records.collective import CallRecord
from allranks.records.telemetry import CallTotals

KINDS = 512
"""More kinds of calls than this are summed under one name."""
_OTHERS = "(others)"

_Key = tuple[str, str, str, int, int, str]


class _Sums:
    """The sums of one kind of call."""

    __slots__ = ("calls", "fastest", "last", "moving", "transfer", "wait")

    def __init__(self) -> None:
        self.calls = 0
        self.wait = self.transfer = self.moving = 0.0
        self.fastest = float("inf")
        self.last: dict[int, tuple[int, float]] = {}
        """For each rank that was the last: how often, and for how long this one waited then."""

    def add(self, wait: float, transfer: float, moving: float, last_rank: int) -> None:
        """Counts one call."""
        self.calls += 1
        self.wait += wait
        self.transfer += transfer
        self.moving += moving
        self.fastest = min(self.fastest, moving)
        if last_rank >= 0:
            calls, seconds = self.last.get(last_rank, (0, 0.0))
            self.last[last_rank] = calls + 1, seconds + wait

    def told(self, key: _Key) -> CallTotals:
        """The sums as they are sent."""
        last = tuple((rank, *sums) for rank, sums in sorted(self.last.items()))
        sums = self.calls, self.wait, self.transfer, self.moving, self.fastest
        return CallTotals(*key, *sums, last)


class Totals:
    """Counts the calls of a journal, by default this process's, from the moment it is made."""

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal or world.current().journal
        self._sums: dict[_Key, _Sums] = {}
        self.begin()

    def begin(self) -> None:
        """Forgets what has been counted."""
        self._journal.take()
        self._sums.clear()
        self.spans = Spans(perf_counter())

    def changed(self) -> list[CallTotals]:
        """The kinds of calls that have been made since the last time, with all their sums.

        May be asked from another thread while calls are made.
        """
        touched: dict[_Key, _Sums] = {}
        now, spans = perf_counter(), self.spans
        for call in self._journal.take():
            if isinstance(call, CallRecord):
                op, name, dtype, ranks = call.op, call.name, call.dtype, call.ranks
                wait, transfer = call.wait_seconds, call.transfer_seconds
                moving = call.moving_seconds
            else:
                spec, name, ranks = call.spec, call.name or named(call.site), call.members.size
                op, dtype = spec.op, spec.dtype
                wait = max(0.0, call.last - call.started)
                moving = transfer = max(0.0, call.ended - max(call.last, call.started))
            key = op, name, dtype, call.nbytes, ranks, call.transport
            if key not in self._sums and len(self._sums) >= KINDS:
                key = (op, _OTHERS, "", 0, ranks, "")
            sums = touched[key] = self._sums.get(key) or self._sums.setdefault(key, _Sums())
            sums.add(wait, transfer, moving, call.last_rank)
            if spans.origin <= call.ended <= now:
                spans.call(call.ended, wait, transfer, call.last_rank)
        return [sums.told(key) for key, sums in touched.items()]
