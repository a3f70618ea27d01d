"""Times of the calls: sums by kind of call, the shares of a cell's time, and the timeline.

The timeline is a Chrome trace, which Perfetto opens.

Source: "Trace Event Format", Google, events of phase X and M.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from allranks.collectives import world
from allranks.collectives.calls.journal import Journal, named
from allranks.collectives.calls.sites import Site
from allranks.collectives.ops import operations
from allranks.collectives.ops.inputs import run
from allranks.records.telemetry import CallRecord, CallTotals

BINS = 256
# The bins of the first second of a cell. Later they are merged in pairs, so they always suffice.
_FIRST_WIDTH_SECONDS = 1 / 256
_MOST_ROWS = 64
"""The most ranks with a row of waits; waits for further ranks are counted for rank -1."""

Row = list[float]


class Spans:
    """Bins of time from a cell's start (``origin``) on; when all are full, each two are merged."""

    def __init__(self, origin: float) -> None:
        self.origin = origin
        self.width = _FIRST_WIDTH_SECONDS
        self._end = origin + BINS * self.width
        self.transfer: Row = [0.0] * BINS
        self.waits: dict[int, Row] = {}
        """By the rank that this rank waited for."""
        self.imports: dict[str, Row] = {}
        """By the module."""
        self.changed_at = origin
        """No bin before this time has changed since it was last set."""

    def call(self, ended: float, wait: float, transfer: float, rank: int) -> None:
        """Counts a call that has ended: it waited, and then it transferred."""
        row = self.waits.get(rank)
        if row is None:
            row = self._row(rank)
        while ended >= self._end:
            self._coarser()
        at = int((ended - self.origin) / self.width)
        met = ended - transfer
        if met - wait < self.changed_at:
            self.changed_at = met - wait
        if met - wait >= self.origin + at * self.width:
            # A short call lies within one bin.
            self.transfer[at] += transfer
            row[at] += wait
        else:
            self._spread(self.transfer, met, ended)
            self._spread(row, met - wait, met)

    def imported(self, module: str, began: float, ended: float) -> None:
        row = self.imports.get(module)
        if row is None:
            if len(self.imports) >= _MOST_ROWS:
                module = "(others)"
            row = self.imports.setdefault(module, [0.0] * BINS)
        self.changed_at = min(self.changed_at, began)
        while ended >= self._end:
            self._coarser()
        self._spread(row, began, ended)

    def used(self, seconds: float) -> int:
        while self.origin + seconds >= self._end:
            self._coarser()
        return max(1, min(BINS, 1 + int(seconds / self.width)))

    def shares(self, bins: int, first: int = 0, each: int = 1) -> bytes:
        """Shares of importing, waiting and transfer, as bytes; ``each`` bins become one."""
        data = bytearray()
        for rows in (self.imports.values(), self.waits.values(), [self.transfer]):
            for at in range(first, bins, each):
                share = sum(sum(row[at : at + each]) for row in rows) / (each * self.width)
                data.append(max(0, min(255, round(255 * share))))
        return bytes(data)

    def waited_for(self, bins: int, first: int = 0, each: int = 1) -> bytes:
        """Returns for each bin the rank that this rank waited longest for, or -1."""
        data = array("h")
        for at in range(first, bins, each):
            sums = {rank: sum(row[at : at + each]) for rank, row in self.waits.items()}
            rank = max(sums, key=lambda one: sums[one], default=-1)
            data.append(rank if rank >= 0 and sums[rank] > 0 else -1)
        return data.tobytes()

    @contextmanager
    def waiting(self, since: float, now: float, rank: int) -> Iterator[None]:
        """Within, counts a wait that has not ended; its end counts it for good."""
        self.used(now - self.origin)
        row = self._row(rank)
        before = list(row)
        self._spread(row, since, now)
        self.changed_at = min(self.changed_at, since)
        try:
            yield
        finally:
            row[:] = before

    def _row(self, rank: int) -> Row:
        if rank < 0 or rank > 32_767 or len(self.waits) >= _MOST_ROWS:
            rank = -1
        return self.waits.setdefault(rank, [0.0] * BINS)

    def _spread(self, row: Row, began: float, ended: float) -> None:
        # Without the part before the cell.
        began = max(0.0, began - self.origin)
        ended -= self.origin
        while began < ended:
            at = int(began / self.width)
            edge = min(ended, (at + 1) * self.width)
            if edge <= began:  # by rounding
                at, edge = at + 1, min(ended, (at + 2) * self.width)
            if at >= BINS:
                return
            row[at] += edge - began
            began = edge

    def _coarser(self) -> None:
        self.width *= 2
        self._end = self.origin + BINS * self.width
        for row in (self.transfer, *self.waits.values(), *self.imports.values()):
            pairs = [a + b for a, b in zip(row[::2], row[1::2], strict=True)]
            row[:] = pairs + [0.0] * (BINS - len(pairs))


KINDS = 512
"""The most kinds of calls with sums of their own; further kinds are summed under one name."""
_OTHERS = "(others)"

_Key = tuple[str, str, str, int, int, str]


@dataclass(slots=True)
class Sums:
    """The sums of one kind of call."""

    calls: int = 0
    wait: float = 0.0
    transfer: float = 0.0
    moving: float = 0.0
    fastest: float = float("inf")
    last: dict[int, tuple[int, float]] = field(default_factory=dict)
    """For each rank that arrived last: how often, and how long this rank waited then."""

    def add(self, wait: float, transfer: float, moving: float, last_rank: int) -> None:
        self.calls += 1
        self.wait += wait
        self.transfer += transfer
        self.moving += moving
        self.fastest = min(self.fastest, moving)
        if last_rank >= 0:
            calls, seconds = self.last.get(last_rank, (0, 0.0))
            self.last[last_rank] = calls + 1, seconds + wait

    def record(self, key: _Key) -> CallTotals:
        last = tuple((rank, *sums) for rank, sums in sorted(self.last.items()))
        sums = self.calls, self.wait, self.transfer, self.moving, self.fastest
        return CallTotals(*key, *sums, last)


class Totals:
    """Sums the calls of a journal, by default this process's, from now on. With ``began``, it sums
    those that were not taken yet, too, and the cell began at that time.
    """

    def __init__(self, journal: Journal | None = None, began: float | None = None) -> None:
        self._journal = journal or world.current().journal
        self._sums: dict[_Key, Sums] = {}
        if began is None:
            self._journal.take()
        self.spans = Spans(perf_counter() if began is None else began)

    def changed(self) -> list[CallTotals]:
        """The sums of all kinds of calls that were made since the last time. May be called from
        another thread while calls are made.
        """
        if not self._journal.fresh:
            return []
        touched: dict[_Key, Sums] = {}
        now, spans = perf_counter(), self.spans
        # A cell may have made thousands of calls, most of them in the same few lines.
        names: dict[Site, str] = {}
        for call in self._journal.take():
            if not isinstance(call, CallRecord) and call.device_seconds is not None:
                call = self._journal.record(call)
            if isinstance(call, CallRecord):
                op, name, dtype, ranks = call.op, call.name, call.dtype, call.ranks
                wait, transfer = call.wait_seconds, call.transfer_seconds
                moving = call.moving_seconds
            else:
                # As in `Journal.record`, whose record would take as long to make as the call.
                site, spec, ranks = call.site, call.packed.spec, call.agreement.members.size
                name = call.name or names.get(site) or names.setdefault(site, named(site))
                op, dtype = spec.op, spec.dtype
                wait = max(0.0, call.last - call.started)
                moving = transfer = max(0.0, call.ended - max(call.last, call.started))
            key = op, name, dtype, call.nbytes, ranks, call.transport
            if key not in self._sums and len(self._sums) >= KINDS:
                key = (op, _OTHERS, "", 0, ranks, "")
            sums = touched[key] = self._sums.get(key) or self._sums.setdefault(key, Sums())
            sums.add(wait, transfer, moving, call.last_rank)
            if spans.origin <= call.ended <= now:
                spans.call(call.ended, wait, transfer, call.last_rank)
        return [sums.record(key) for key, sums in touched.items()]


def timeline(path: str | Path) -> None:
    """Writes the recorded calls of all ranks to a file, which https://ui.perfetto.dev opens.

    One row a rank; each call is a slice "waiting" until the last rank had arrived, and a slice of
    the call's name while it moved data. The first rank writes; the others send it their records.

    Args:
        path: on the first rank's host; ignored elsewhere.

    Collective over all ranks.
    """
    this = world.current()
    mine = this.journal.records
    every = run(operations.begin_object_gather(this.groups[0], "timeline", mine, root=0))
    if this.rank == 0:
        Path(path).write_text(json.dumps(trace(every, this.hosts)))
    # Afterwards the file exists, for ranks that see the first rank's files too.
    run(operations.begin_barrier(name="timeline"))


def trace(every: list[list[CallRecord]], hosts: tuple[int, ...]) -> dict[str, Any]:
    """The events of all ranks' records; times count from the first arrival, in microseconds."""
    starts = [record.arrived for records in every for record in records]
    origin = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for rank, records in enumerate(every):
        about = {"ph": "M", "pid": hosts[rank], "tid": rank}
        events.append({**about, "name": "process_name", "args": {"name": f"host {hosts[rank]}"}})
        events.append({**about, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        for record in records:
            events += _slices(record, origin, hosts[rank])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slices(record: CallRecord, origin: float, host: int) -> list[dict[str, Any]]:
    ready = max(record.arrived, record.last_arrived)
    waited = {
        "cat": "waiting",
        "name": f"waiting for rank {record.last_rank}",
        "args": {"call": record.name},
    }
    details = {
        "op": record.op,
        "bytes": record.nbytes,
        "dtype": record.dtype,
        "process set": record.process_set,
        "transport": record.transport,
        "last rank": record.last_rank,
        "ms on the GPU": None if record.device_seconds is None else record.device_seconds * 1e3,
        "algbw GB/s": record.algbw_gbps,
        "busbw GB/s": record.busbw_gbps,
    }
    moved = {"cat": "transfer", "name": f"{record.op} {record.name}", "args": details}
    spans = [(waited, record.arrived, ready), (moved, ready, max(ready, record.ended))]
    times = {"ph": "X", "pid": host, "tid": record.rank}
    return [
        {**times, **what, "ts": (start - origin) * 1e6, "dur": (end - start) * 1e6}
        for what, start, end in spans[ready == record.arrived :]
    ]
