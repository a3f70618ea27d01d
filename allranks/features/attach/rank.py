"""Ranks that stay when their notebook ends: answers the next one, and keeps output for it.

A kept cell is bounded: its first messages are dropped, with a notice. Text is complete in the
rank's log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from allranks import collectives
from allranks.collectives import world
from allranks.engine.features import Answered, RankContext, RankFeature
from allranks.features.attach.requests import ATTACH, RESUME, SEEN, STAY
from allranks.records import requests
from allranks.records.telemetry import Points, Timings
from allranks.records.wire import (
    Output,
    Prompt,
    Query,
    Record,
    Reply,
    RunCell,
    RunMember,
    Typed,
    Widget,
    encode,
)

_MOST_NBYTES = 16 << 20
_KEPT = (Output, Points, Timings, Reply)

Frames = Sequence[bytes]


class RankAttach(RankFeature):
    """Describes the last cell to another notebook, and sends it the output again."""

    records = (RunCell, RunMember, Query, Typed)
    requests_while_busy = frozenset({STAY, SEEN, ATTACH, RESUME})

    def __init__(self) -> None:
        self._kept: KeptCell | None = None
        self._last: RunCell | RunMember | None = None
        self._in_ensemble = False
        self._began = monotonic()

    def started(self, rank: RankContext) -> None:
        self._rank, self._wire = rank, rank.wire
        if rank.stays:
            self._stay(rank.config.session_dir)

    def _stay(self, home: str) -> None:
        if self._kept is None:
            self._kept = KeptCell(self._rank.rank, self._rank.transcript.path)
        self._wire.stay(home, self._kept)

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        if isinstance(record, RunCell | RunMember):
            self._last = record
            self._in_ensemble = isinstance(record, RunMember)
            self._began = monotonic()
        elif isinstance(record, Typed):
            if self._kept is not None:
                self._kept.prompt_answered()
        elif isinstance(record, Query) and record.name == requests.MEMBERS:
            if record.arguments["ranks_each"] or self._wire.busy:
                return
            self._in_ensemble = False  # it is over, and its notebook has shown it
            if self._kept is not None:
                self._kept.clear()

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        wire, kept = self._wire, self._kept
        if name == STAY:
            self._stay(arguments["home"])
        elif name == SEEN:
            if kept is not None and arguments["cell"] == wire.cell and not wire.busy:
                kept.clear()
        elif name == RESUME:
            wire.resume()
        else:
            wire.send(self._rank.hello)
            return self._about(), []
        return {}, []

    def _about(self) -> dict[str, Any]:
        wire, last, kept = self._wire, self._last, self._kept
        # Sent, but not begun yet, counts as busy.
        busy = last is not None and (wire.busy or wire.cell != last.cell)
        this = world.current()
        ended = kept.ended if kept is not None else 0.0
        return {
            "cell": last.cell if last is not None else 0,
            "label": last.label if last is not None else "",
            "ranks": last.ranks if isinstance(last, RunCell) else (),
            "member": self._in_ensemble,
            "busy": busy,
            "unseen": kept is not None and kept.has_reply,
            "seconds": max(0.0, (monotonic() if busy else ended) - self._began),
            "epoch": collectives.epoch(),
            "needs": this.needs,
            "dirty": collectives.dirty(),
            "traffic": bool(this.traffic),
            "failed": not busy and this.last_failed,
            "died": sorted(this.died),
            "healing": False,  # where no feature replaces ranks
            "new": this.lacks_variables,
        } | self._rank.handover_fields()


class KeptCell:
    """The messages of the last cell, until a notebook reports that it has shown them.

    Attributes:
        has_reply: whether the reply to the cell is among them.
        ended: when the last cell ended, by the monotonic clock.
    """

    def __init__(self, rank: int, log: str) -> None:
        self._rank = rank
        self._log = log
        self.ended = 0.0
        self.clear()

    def clear(self) -> None:
        self._messages: deque[Frames] = deque()
        self._nbytes = 0
        self._dropped = False
        self._prompt: Frames | None = None
        self._widgets: dict[str, Widget] = {}
        self.has_reply = False

    def take(self, record: Record, frames: Frames) -> None:
        if isinstance(record, Prompt):
            self._prompt = frames
        elif isinstance(record, Widget):
            self._take_widget(record, frames)
        elif isinstance(record, _KEPT):
            self._add(frames)
            if isinstance(record, Reply):
                self.has_reply, self.ended, self._prompt = True, monotonic(), None

    def _take_widget(self, record: Widget, frames: Frames) -> None:
        # The current state of a widget stands for all its updates.
        known = self._widgets.get(record.comm)
        if len(frames) > 1:
            self._add(frames)  # its buffers belong to places in its state
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
        self._messages.append(frames)
        self._nbytes += sum(map(len, frames))
        while self._nbytes > _MOST_NBYTES and len(self._messages) > 1:
            self._nbytes -= sum(map(len, self._messages.popleft()))
            self._dropped = True

    def prompt_answered(self) -> None:
        self._prompt = None

    def messages(self, cell: int) -> Iterator[Frames]:
        for widget in self._widgets.values():
            yield encode(widget)
        if self._dropped:
            # Text is complete in the log.
            notice = f"its first displays were not kept; the text is in {self._log}"
            yield encode(Output(self._rank, cell, (["notice", notice],), 0, 0, 0))
        yield from self._messages
        if self._prompt is not None:
            yield self._prompt


FEATURE = RankAttach
