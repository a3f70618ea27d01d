"""Every call's record, the last hundred thousand of them. Runs in every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from allranks.records.collective import CallRecord

if TYPE_CHECKING:
    from allranks.collectives.call import Call

KEPT = 100_000


class Recorder:
    """Keeps records and passes them on."""

    def __init__(self) -> None:
        self.records: deque[CallRecord] = deque(maxlen=KEPT)
        self.callback: Callable[[CallRecord], None] | None = None
        self.offset_seconds = 0.0
        """What this host's clock lacks to the first rank's host's."""

    def add(self, call: Call) -> None:
        """Notes a call that has ended."""
        group, offset = call.group, self.offset_seconds
        spec = call.spec
        record = CallRecord(
            spec.op,
            call.name or str_site(call),
            group.world.rank,
            call.sequence,
            group.world.epoch,
            group.number,
            len(group.ranks),
            call.transport,
            spec.dtype,
            call.nbytes,
            call.started + offset,
            (call.last or call.started) + offset,
            call.last_rank,
            call.ended + offset,
        )
        self.records.append(record)
        if self.callback is not None:
            self.callback(record)


def str_site(call: Call) -> str:
    """The name of a call that was given none: file and line."""
    filename, lineno = call.site
    return f"{filename.rpartition('/')[2]}:{lineno}"
