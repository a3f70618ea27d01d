"""Sums of a rank's calls by op, name and size, made beside the calls."""

from __future__ import annotations

from typing import Any

from allranks.collectives import world
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.journal import Journal, named
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
        self.last: dict[int, list[Any]] = {}


class Totals:
    """Counts a rank's calls from the moment it is made; a call itself is hardly slower for it.

    Args:
        journal: whose calls are counted; by default this process's.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal or world.current().journal
        self._sums: dict[_Key, _Sums] = {}
        self.begin()

    def begin(self) -> None:
        """Forgets what has been counted."""
        self._journal.take()
        self._sums.clear()

    def changed(self) -> list[CallTotals]:
        """The kinds of calls that have been made since the last time, with all their sums.

        May be asked from another thread while calls are made.
        """
        touched: dict[_Key, _Sums] = {}
        for call in self._journal.take():
            if isinstance(call, CallRecord):
                key, ranks = _key_of_record(call), call.ranks
                wait, transfer = call.wait_seconds, call.transfer_seconds
                moving = call.moving_seconds
            else:
                key, ranks = _key_of_call(call), call.members.size
                arrived, ready = call.started, call.last or call.started
                wait = max(0.0, ready - arrived)
                moving = transfer = max(0.0, call.ended - max(ready, arrived))
            if key not in self._sums and len(self._sums) >= KINDS:
                key = (key[0], _OTHERS, "", 0, ranks, "")
            sums = self._sums.get(key)
            if sums is None:
                sums = self._sums[key] = _Sums()
            _add(sums, wait, transfer, moving, call.last_rank)
            touched[key] = sums
        return [_told(key, sums) for key, sums in touched.items()]


def _add(sums: _Sums, wait: float, transfer: float, moving: float, last_rank: int) -> None:
    sums.calls += 1
    sums.wait += wait
    sums.transfer += transfer
    sums.moving += moving
    sums.fastest = min(sums.fastest, moving)
    if last_rank >= 0:
        last = sums.last.get(last_rank)
        if last is None:
            last = sums.last[last_rank] = [0, 0.0]
        last[0] += 1
        last[1] += wait


def _key_of_record(call: CallRecord) -> _Key:
    return call.op, call.name, call.dtype, call.nbytes, call.ranks, call.transport


def _key_of_call(call: Call) -> _Key:
    name = call.name or named(call.site)
    spec = call.spec
    return spec.op, name, spec.dtype, call.nbytes, call.members.size, call.transport


def _told(key: _Key, sums: _Sums) -> CallTotals:
    last = tuple((rank, calls, seconds) for rank, (calls, seconds) in sorted(sums.last.items()))
    return CallTotals(*key, sums.calls, sums.wait, sums.transfer, sums.moving, sums.fastest, last)
