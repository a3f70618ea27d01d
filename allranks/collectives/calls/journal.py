"""Every call's record, the last hundred thousand of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from allranks.collectives.calls.call import EPOCH_SHIFT, Call
from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.standing import Standing
from allranks.records.telemetry import CallRecord

KEPT = 100_000


class Journal:
    """Keeps the calls that have ended, and passes their records on."""

    def __init__(self, own: Standing | None = None) -> None:
        self._own = own
        self.fresh: deque[Call | CallRecord] = deque(maxlen=KEPT)
        """What has ended and was not taken yet. A call that holds no arrays is kept as it is:
        making its record takes as long as all the rest of it, and is done when somebody asks."""
        self._taken: deque[Call | CallRecord] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self.keep: Callable[[Call], None] = self.fresh.append
        """Notes a call that has ended, and holds no arrays any more."""
        self._callback: Callable[[CallRecord], None] | None = None

    def tell(self, callback: Callable[[CallRecord], None] | None) -> None:
        """Passes every record to ``callback`` as soon as the call has ended."""
        self._callback = callback
        self.keep = self.fresh.append if callback is None else self.add

    def add(self, call: Call) -> None:
        """Notes a call that has ended as a record."""
        record = self._record(call)
        self.fresh.append(record)
        if self._callback is not None:
            self._callback(record)

    def take(self) -> list[Call | CallRecord]:
        """What has ended since the last time; may be asked from another thread."""
        with self._lock:
            found = [self.fresh.popleft() for _ in range(len(self.fresh))]
            self._taken += found
        return found

    @property
    def records(self) -> list[CallRecord]:
        """All that is kept, oldest first."""
        with self._lock:
            every = [*self._taken, *self.fresh][-KEPT:]
        return [it if isinstance(it, CallRecord) else self._record(it) for it in every]

    def _record(self, call: Call) -> CallRecord:
        members, started = call.members, call.started
        epoch, sequence = divmod(call.number, 1 << EPOCH_SHIFT)
        offset = self._own.offset_seconds if self._own is not None else 0.0
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


def named(site: Site) -> str:
    """The name of a call that was given none: file and line."""
    return f"{site.filename.rpartition('/')[2]}:{site.lineno}"
