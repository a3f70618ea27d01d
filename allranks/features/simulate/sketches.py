"""What a picture of a simulated cell shows, as plain data: the notebook draws it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from allranks.features.simulate.events import RankEvent
from allranks.features.simulate.scheduler import Scheduler

_MOST_RANKS, _MOST_EVENTS = 64, 4000
_CELLS = 64


def sketch(scheduler: Scheduler) -> bytes:
    """Returns the events of each rank; of many ranks or events, the bytes of each two ranks."""
    size, events = len(scheduler.tasks), scheduler.events
    lost, _ = scheduler.mail.unmatched()
    found: dict[str, Any] = {"size": size}
    if size <= _MOST_RANKS and len(events) <= _MOST_EVENTS:
        found["clocks"] = [task.clock for task in scheduler.tasks]
        found["stalled"] = [[rank, *since] for rank, since in scheduler.stalled.items()]
        found["events"] = [
            [one.rank, one.kind, one.begin, one.ready, one.end, one.peer, one.number, _about(one)]
            for one in events
        ]
        found["lost"] = [
            [one.source, one.dest, one.began, f"{one.title} at {one.site}, tag {one.tag}"]
            for one in lost
        ]
        return json.dumps(found).encode()
    found["each"] = each = -(-size // _CELLS)
    sent: Counter[tuple[int, int]] = Counter()
    for one in events:
        if one.kind == "receive":
            sent[one.peer // each, one.rank // each] += one.nbytes
    for message in lost:
        sent[message.source // each, message.dest // each] += message.nbytes
    red = {(one.source // each, one.dest // each) for one in lost}
    found["sent"] = [[*pair, nbytes, pair in red] for pair, nbytes in sorted(sent.items())]
    return json.dumps(found).encode()


def _about(event: RankEvent) -> str:
    what = f"{event.title} at {event.site}" if event.site else event.title
    return what if event.kind == "collective" else f"{what}, tag {event.tag}, {event.nbytes:,} B"
