"""Every call's record, the last hundred thousand of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from allranks.collectives.calls.call import Call
from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.standing import Standing
from allranks.records.collective import CallRecord

KEPT = 100_000


class Journal:
    """Keeps records and passes them on."""

    def __init__(self, own: Standing | None = None) -> None:
        self._own = own
        self._kept: deque[Call | CallRecord] = deque(maxlen=KEPT)
        self.callback: Callable[[CallRecord], None] | None = None
        self.fresh: deque[Call | CallRecord] | None = None
        """What :class:`Totals` has not counted yet; None while nobody counts."""

    def add(self, call: Call) -> None:
        """Notes a call that has ended."""
        if self.callback is None and call.light:
            # Made into a record when somebody asks: that takes as long as all the rest of it.
            self._kept.append(call)
            if self.fresh is not None:
                self.fresh.append(call)
            return
        record = self._record(call)
        self._kept.append(record)
        if self.fresh is not None:
            self.fresh.append(record)
        if self.callback is not None:
            self.callback(record)

    @property
    def records(self) -> list[CallRecord]:
        """All that is kept, oldest first."""
        return [it if isinstance(it, CallRecord) else self._record(it) for it in self._kept]

    def _record(self, call: Call) -> CallRecord:
        members, started = call.members, call.started
        offset = self._own.offset_seconds if self._own is not None else 0.0
        return CallRecord(
            op=call.spec.op,
            name=call.name or named(call.site),
            rank=members.rank,
            sequence=call.sequence,
            epoch=call.epoch,
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
