"""The calls of all ranks as a Chrome trace, which Perfetto opens.

Source: "Trace Event Format", Google, events of phase X and M.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allranks.collectives import world
from allranks.collectives.ops import moving, objects
from allranks.collectives.ops.handles import run
from allranks.records.collective import CallRecord


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
    every = run(objects.gather(this.groups[0], "timeline", mine, root=0))
    if this.rank == 0:
        Path(path).write_text(json.dumps(trace(every, this.hosts)))
    run(moving.begin_barrier(name="timeline"))


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
    common = {"ph": "X", "pid": host, "tid": record.rank}
    ready = max(record.arrived, record.last_arrived)
    said = {
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
    waited: dict[str, Any] = {"cat": "waiting", "name": f"waiting for rank {record.last_rank}"}
    moved: dict[str, Any] = {"cat": "transfer", "name": f"{record.op} {record.name}", "args": said}
    waited["args"] = {"call": record.name}
    spans = (waited, record.arrived, ready), (moved, ready, max(ready, record.ended))
    return [
        {**common, **what, "ts": (start - origin) * 1e6, "dur": (end - start) * 1e6}
        for what, start, end in (spans if ready > record.arrived else spans[1:])
    ]
