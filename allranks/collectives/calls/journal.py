"""Every call's record, the last hundred thousand of them. Runs in every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from allranks.records.collective import CallRecord

if TYPE_CHECKING:
    from allranks.collectives.calls.call import Call
    from allranks.collectives.calls.callsite import Site

KEPT = 100_000


class Recorder:
    """Keeps records and passes them on."""

    def __init__(self) -> None:
        self._kept: deque[Call | CallRecord] = deque(maxlen=KEPT)
        self.callback: Callable[[CallRecord], None] | None = None
        self.fresh: deque[Call | CallRecord] | None = None
        """What :class:`Totals` has not counted yet; None while nobody counts."""
        self.offset_seconds = 0.0
        """What this host's clock lacks to the first rank's host's."""

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
        group, offset, started = call.group, self.offset_seconds, call.started
        return CallRecord(
            op=call.spec.op,
            name=call.name or named(call.site),
            rank=group.world.rank,
            sequence=call.sequence,
            epoch=call.epoch,
            process_set=group.number,
            ranks=len(group.ranks),
            transport=call.transport,
            dtype=call.spec.dtype,
            nbytes=call.nbytes,
            arrived=started + offset,
            last_arrived=(call.last or started) + offset,
            last_rank=call.last_rank,
            ended=call.ended + offset,
            device_seconds=call.device_seconds,
        )


def named(site: Site) -> str:
    """The name of a call that was given none: file and line."""
    return f"{site.filename.rpartition('/')[2]}:{site.lineno}"
