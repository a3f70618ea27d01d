"""The records of a rank's calls, and the time that it spent in posted calls.

A posted call progresses only while its rank polls, synchronizes or makes another call; computation
in between is neither waiting nor transfer. So `Presence` counts time on a clock that stops while
the rank computes, and counts no moment for two calls that overlap.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import chain, takewhile
from time import perf_counter

from allranks.collectives.calls.call import Call
from allranks.collectives.calls.rank_state import EPOCH_SHIFT, RankState
from allranks.collectives.calls.sites import Site
from allranks.records.telemetry import CallRecord


class Presence:
    """The time in overlapping calls; entered while the rank is in them."""

    def __init__(self) -> None:
        self._away = 0.0
        self._came = 0.0
        self._left: float | None = None
        self._counted = 0.0
        self._ended = 0.0

    def __enter__(self) -> None:
        self._came = perf_counter()
        if self._left is not None:
            self._away += self._came - self._left
            self._left = None

    def __exit__(self, *_: object) -> None:
        self._left = perf_counter()

    def begin(self, call: Call) -> None:
        began = call.started - self._away
        call.began, call.uncounted = began, began - self._counted

    def note(self, call: Call) -> None:
        """Records, after all ranks have arrived, when this rank could notice it."""
        if call.moving and call.ready_at < 0:
            call.ready_at = max(call.last, self._came) - self._away

    def end(self, call: Call) -> None:
        """Counts the time that no other call has counted: waiting, and transfer."""
        now = call.ended - self._away
        self.note(call)
        fresh = max(now - self._counted - call.uncounted, now - max(call.began, self._ended))
        transfer = now - max(call.began, call.ready_at, self._ended)
        transfer = max(0.0, min(fresh, transfer))
        wait = max(0.0, min(fresh - transfer, call.ready_at - call.began))
        call.attended = wait, transfer
        self._counted += wait + transfer
        self._ended = now


KEPT = 100_000


class Journal:
    """Keeps the last 100,000 calls that have ended, and passes their records on."""

    def __init__(self, own: RankState) -> None:
        self._own = own
        self.fresh: deque[Call | CallRecord] = deque(maxlen=KEPT)
        """Calls that have ended and were not taken yet. A call without arrays is kept as it is: to
        make its record takes as long as the call, and is done on request."""
        self._taken: deque[Call | CallRecord] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self.keep: Callable[[Call], None] = self.fresh.append
        """Records the end of a call that holds no arrays any more."""
        self._callback: Callable[[CallRecord], None] | None = None

    def set_callback(self, callback: Callable[[CallRecord], None] | None) -> None:
        self._callback = callback
        self.keep = self.fresh.append if callback is None else self.add

    def add(self, call: Call) -> None:
        record = self.record(call)
        self.fresh.append(record)
        if self._callback is not None:
            self._callback(record)

    def take(self) -> list[Call | CallRecord]:
        """The calls that have ended since the last call of this; safe in any thread."""
        with self._lock:
            # One by one, because another thread may add calls meanwhile.
            found = [self.fresh.popleft() for _ in range(len(self.fresh))]
            self._taken += found
        return found

    @property
    def records(self) -> list[CallRecord]:
        """All calls that are kept, oldest first."""
        return self.since(float("-inf"), KEPT)[0]

    def since(self, ended: float, most: int) -> tuple[list[CallRecord], int]:
        """The last ``most`` of the calls that ended after a time, oldest first, and how many
        there are in all.
        """
        own = ended - self._own.offset_seconds
        with self._lock:
            newest = chain(reversed([*self.fresh]), reversed(self._taken))
            found = [*takewhile(lambda it: _ended_after(it, ended, own), newest)]
        last = reversed(found[:most])
        records = [it if isinstance(it, CallRecord) else self.record(it) for it in last]
        return records, len(found)

    def now(self) -> float:
        """This moment, by the clock of the records."""
        return perf_counter() + self._own.offset_seconds

    def record(self, call: Call) -> CallRecord:
        """The record of a call that has ended."""
        members, started = call.members, call.started
        epoch, sequence = divmod(call.number, 1 << EPOCH_SHIFT)
        offset = self._own.offset_seconds
        return CallRecord(
            op=call.spec.op,
            name=call.name or named(call.site),
            rank=members.rank,
            sequence=sequence,
            epoch=epoch,
            process_set=members.number,
            ranks=members.size,
            transport=call.transport,
            dtype=call.spec.dtype,
            nbytes=call.nbytes,
            arrived=started + offset,
            last_arrived=(call.last or started) + offset,
            last_rank=call.last_rank,
            ended=call.ended + offset,
            device_seconds=call.device_seconds,
            attended=call.attended,
        )


def _ended_after(it: Call | CallRecord, time: float, own_time: float) -> bool:
    # A call has the times of this host, a record those of the first one.
    return it.ended > (time if isinstance(it, CallRecord) else own_time)


def named(site: Site) -> str:
    return f"{site.filename.rpartition('/')[2]}:{site.lineno}"
