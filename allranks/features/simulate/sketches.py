"""What a picture of a simulated cell shows, as plain data: the notebook draws it."""

from __future__ import annotations

import io
import json
import pickle
import reprlib
from collections import Counter
from typing import Any

from allranks.features.simulate.events import RankEvent
from allranks.features.simulate.scheduler import Scheduler

_MOST_RANKS, _MOST_EVENTS = 64, 4000
_CELLS = 64
_words = reprlib.Repr()
_words.maxstring = _words.maxother = 40


def sketch(scheduler: Scheduler) -> bytes:
    """Returns the events of each rank; of many ranks or events, the bytes of each two ranks."""
    size, events = len(scheduler.tasks), scheduler.events
    lost, _ = scheduler.mail.unmatched()
    found: dict[str, Any] = {"size": size}
    if size <= _MOST_RANKS and len(events) <= _MOST_EVENTS:
        found["clocks"] = [task.clock for task in scheduler.tasks]
        found["stalled"] = [[rank, *since] for rank, since in scheduler.stalled.items()]
        found["events"] = [
            [one.rank, one.kind, one.begin, one.ready, one.end, one.peer, one.number, *_about(one)]
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


def _about(event: RankEvent) -> tuple[str, bool]:
    what = f"{event.title} at {event.site}" if event.site else event.title
    if event.kind == "collective":
        return what, False
    parts = [f"{what}, tag {event.tag}, {event.nbytes:,} B"]
    if said := _value(event.payload):
        parts.append(f": {said}")
    if event.races:
        parts.append(" (could also get another message)")
    return "".join(parts), event.races


def _value(payload: bytes) -> str:
    """A short value in words; empty for instances of classes, whose code is not run."""
    try:
        return _words.repr(_Plain(io.BytesIO(payload)).load()) if payload else ""
    except Exception:  # a pickle may fail in any way
        return ""


class _Plain(pickle.Unpickler):
    """Reads numbers, text and containers of them."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"expected no class, found {module}.{name}")
