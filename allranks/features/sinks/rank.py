"""Reports the calls of each cell one by one, where the notebook has asked for it."""

from __future__ import annotations

import socket
import threading
from time import monotonic, time

from allranks.collectives import world
from allranks.engine.features import RankContext, RankFeature
from allranks.features.sinks.records import TraceCells, TracedCall, TracedCalls
from allranks.records.wire import Record, RunCell

_SECONDS = 0.5
#: Of more calls within that time, the latest are reported.
_MOST = 1000


class RankTrace(RankFeature):
    """Reads the journal of calls a few times a second, and at the end of each cell."""

    dormant = True  # until a cell is traced
    records = (TraceCells,)

    def started(self, rank: RankContext) -> None:
        self._rank = rank
        self._host = socket.gethostname()
        self._cell: RunCell | None = None
        # Output is sent by the main thread and by that of the wire.
        self._lock = threading.Lock()

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        self._rank.activate(self)

    def cell_started(self, cell: RunCell) -> None:
        with self._lock:
            self._cell, self._due = cell, 0.0
            self._began = time()
            self._seen = world.current().journal.now()

    def output_sending(self, final: bool) -> None:
        with self._lock:
            if self._cell is None or (monotonic() < self._due and not final):
                return
            self._due = monotonic() + _SECONDS
            self._report(self._cell, final)
            if final:
                self._cell = None

    def _report(self, cell: RunCell, final: bool) -> None:
        journal = world.current().journal
        calls, count = journal.since(self._seen, _MOST)
        # The journal's clock is that of the first host.
        now = time()
        zero = now - journal.now()
        if calls:
            self._seen = calls[-1].ended
        traced = [
            TracedCall(
                op=call.op,
                line=call.name,
                nbytes=call.nbytes,
                dtype=call.dtype,
                group_size=call.ranks,
                transport=call.transport,
                began=zero + call.arrived,
                complete=zero + max(call.arrived, call.last_arrived),
                ended=zero + call.ended,
                wait_seconds=call.wait_seconds,
                last_rank=call.last_rank,
            )
            for call in calls
        ]
        self._rank.wire.send(
            TracedCalls(
                rank=self._rank.rank,
                cell=cell.cell,
                label=cell.label,
                host=self._host,
                began=self._began,
                ended=now if final else 0.0,
                calls=tuple(map(list, traced)),
                left_out=count - len(calls),
            )
        )


FEATURE = RankTrace
