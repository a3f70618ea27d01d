"""The output of a rank's last cell, kept for a notebook that attaches later.

Its size is bounded: the first messages are dropped, with a notice. Text is complete in the rank's
log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from allranks.records.telemetry import Points, Timings
from allranks.records.wire import Output, Prompt, Record, Reply, Widget, encode

_MOST_NBYTES = 16 << 20
_KEPT = (Output, Points, Timings, Reply)

Frames = Sequence[bytes]


class Unseen:
    """The messages of the last cell, as they were sent, until a notebook says that it has shown it.

    Args:
        rank: whose they are.
        log: where its text is complete.
    """

    def __init__(self, rank: int, log: str) -> None:
        self._rank = rank
        self._log = log
        self.clear()

    def clear(self) -> None:
        """Forgets all of it: another cell begins, or somebody has seen it."""
        self._told: deque[Frames] = deque()
        self._nbytes = 0
        self._dropped = False
        self._prompt: Frames | None = None
        self._widgets: dict[str, Widget] = {}
        self.has_reply = False

    def take(self, record: Record, frames: Frames) -> None:
        """Takes in what is sent, or would be if anybody listened."""
        if isinstance(record, Prompt):
            self._prompt = frames
        elif isinstance(record, Widget):
            self._take_widget(record, frames)
        elif isinstance(record, _KEPT):
            self._add(frames)
            if isinstance(record, Reply):
                self.has_reply, self._prompt = True, None

    def _take_widget(self, record: Widget, frames: Frames) -> None:
        """Keeps what a widget is now: how it came to be that concerns nobody any longer."""
        known = self._widgets.get(record.comm)
        if len(frames) > 1:
            self._add(frames)  # its buffers have places of their own in its state
        elif record.kind == "comm_open":
            self._widgets[record.comm] = record
        elif known is None:
            self._add(frames)
        elif record.kind == "comm_close":
            del self._widgets[record.comm]
        elif record.data.get("method") == "update":
            state = known.data.get("state", {}) | record.data["state"]
            self._widgets[record.comm] = replace(known, data=known.data | {"state": state})

    def _add(self, frames: Frames) -> None:
        self._told.append(frames)
        self._nbytes += sum(map(len, frames))
        while self._nbytes > _MOST_NBYTES and len(self._told) > 1:
            self._nbytes -= sum(map(len, self._told.popleft()))
            self._dropped = True

    def answered(self) -> None:
        """What the rank asked has been answered."""
        self._prompt = None

    def messages(self, cell: int) -> Iterator[Frames]:
        """Yields them all, in order; ``cell`` is the cell's number."""
        for widget in self._widgets.values():
            yield encode(widget)
        if self._dropped:
            said = f"its first displays were not kept; the text is in {self._log}"
            yield encode(Output(self._rank, cell, (["notice", said],), 0, 0, 0))
        yield from self._told
        if self._prompt is not None:
            yield self._prompt
