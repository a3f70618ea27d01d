"""Ranks that a notebook shares with others, and the cells that others run on them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allranks.cluster import failures
from allranks.cluster.cell_run import View
from allranks.cluster.state import Left
from allranks.features.attach.sessions import messages
from allranks.features.attach.sharing import WatchedState
from allranks.records.ranks import label
from allranks.records.telemetry import Points, Pulse, Strip, Timings
from allranks.records.wire import (
    Died,
    Hello,
    Output,
    Prompt,
    Record,
    Reply,
    RunCell,
    RunMember,
    decode,
)
from allranks.widgets.dashboard.view import cell_view
from allranks.widgets.displays import VIEW

_TICK_SECONDS = 0.1


class WatchedCells:
    """Shows one cell after the other, each below a line with its notebook."""

    def __init__(self, whose: str) -> None:
        self.whose = whose
        self._ranks = WatchedState()
        #: The number of the last cell.
        self.cell = 0
        self._ensemble = ""
        self._view: View | None = None

    def _take(self, head: dict[str, Any], frames: Sequence[bytes]) -> None:
        if not frames:
            self._say(
                f"{head['lost']} messages ({head['nbytes'] / 1e6:.1f} MB) are not shown: this "
                f"notebook was too slow for them. All text is in the logs{self._logs()}"
            )
            return
        record, payloads = decode(frames)
        if isinstance(record, Hello | Reply | Died):
            cell, known = self._ranks.cell, self._ranks.dead.keys()
            # One that had died before is no news of this cell.
            there = cell is not None and record.rank in cell.ranks and record.rank not in known
            if isinstance(record, Died) and there and self._view is not None:
                self._view.notice(f"rank {record.rank} {record.how}")
            self._show_left(self._ranks.apply(record))
            # The other notebook does not say that its cell has ended.
            if self._ranks.cell is not None and not self._ranks.cell.pending:
                self._end()
        elif isinstance(record, RunCell):
            self._begin(record, head.get("ago", 0.0))
        elif isinstance(record, RunMember):
            if self._ensemble != record.ensemble:
                self._end()
                self._ensemble = record.ensemble
                print(f"{self.whose} runs an ensemble, which is shown there.", flush=True)
        elif self._view is not None:
            self._show_record(self._view, record, payloads)

    def _begin(self, cell: RunCell, ago: float) -> None:
        if self._view is not None and cell.cell == self.cell:
            return  # a repetition after lost messages
        self._end()
        self.cell, self._ensemble = cell.cell, ""
        hellos, left = self._ranks.hellos, self._ranks.apply(cell)
        ranks = cell.ranks or tuple(sorted(hellos))
        name = cell.label.removeprefix("cell ")
        since = f", began {ago:.0f} s ago; its output from now on" if ago else ""
        print(f"{name} of {self.whose}, on {label(ranks)}{since}:", flush=True)
        there = [hellos[rank] for rank in ranks if rank in hellos]
        self._view = cell_view("auto", there, None, ago=ago)
        self._show_left(left)

    def _show_left(self, left: Sequence[Left]) -> None:
        if self._view is not None:
            for each in left:
                self._view.left(each.rank, each.status)

    def _show_record(self, view: View, record: Record, payloads: list[bytes]) -> None:
        if isinstance(record, Output):
            if record.cell == self.cell:
                view.output(replace(record, entries=tuple(map(_without_widget, record.entries))))
        elif isinstance(record, Prompt):
            view.notice(f"rank {record.rank} asks for input in {self.whose}: {record.text}")
        elif isinstance(record, Points | Pulse | Strip | Timings):
            view.telemetry(record, payloads)

    async def show(self, door: socket.socket) -> None:
        """Shows what comes through the connection until it ends."""

        async def tick() -> None:
            while True:
                await asyncio.sleep(_TICK_SECONDS)
                if self._view is not None:
                    self._view.refresh()

        ticking = asyncio.create_task(tick())
        try:
            async for head, frames in messages(door):
                self._take(head, frames)
        except OSError:
            pass  # the connection has ended: ask the host agent for the holder
        finally:
            ticking.cancel()
            self._end()

    def _end(self) -> None:
        # All ranks have left the cell, or the connection has ended.
        view, self._view = self._view, None
        cell = self._ranks.cell
        if view is None or cell is None:
            return
        view.finish()
        reports = [reply.report for _, reply in sorted(cell.replies.items()) if reply.report]
        if reports:
            print(failures.describe(reports, cell.ranks), flush=True)

    def _say(self, text: str) -> None:
        if self._view is not None:
            self._view.notice(text)
        else:
            print(text, flush=True)

    def _logs(self) -> str:
        log = next((hello.log for hello in self._ranks.hellos.values()), "")
        return f" in {log.rpartition('/')[0]}" if log else ""


def _without_widget(entry: list[Any]) -> list[Any]:
    """Returns a display as its text: its widget lives in the other notebook."""
    kind, *rest = entry
    if kind in ("display", "update", "result") and VIEW in rest[0]:
        return [kind, {mime: data for mime, data in rest[0].items() if mime != VIEW}, *rest[1:]]
    return entry


@dataclass
class Joined:
    """The ranks that a notebook shares.

    ``guest`` is true if they are another notebook's, else it has lent its own. ``count`` is the
    number of their cells when they were lent; ``news`` are the lines not shown by then.
    """

    name: str
    folder: str
    size: int
    guest: bool
    count: int = 0
    news: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> str:
        # The subject of a sentence.
        return f"{label(range(self.size))} of {self.name}"
