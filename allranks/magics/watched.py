"""What another notebook runs on ranks, shown in this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from allranks.cluster import failures
from allranks.cluster.run import View
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
from allranks.widgets.widget_proxies import VIEW


class Watched:
    """Shows one cell after the other, each below a line that says whose it is.

    Args:
        whose: what the other notebook is called.
    """

    def __init__(self, whose: str) -> None:
        self.whose = whose
        self._hellos: dict[int, Hello] = {}
        #: The number of the last cell.
        self.cell = 0
        self._ensemble = ""
        self._ranks: tuple[int, ...] = ()
        self._view: View | None = None
        self._replies: dict[int, Reply] = {}
        self._lost: set[int] = set()

    def take(self, head: dict[str, Any], frames: Sequence[bytes]) -> None:
        """Takes in what the other notebook tells."""
        if not frames:
            self._say(
                f"{head['lost']} messages ({head['nbytes'] / 1e6:.1f} MB) are not shown: this "
                f"notebook was too slow for them. All text is in the logs{self._logs()}"
            )
            return
        record, payloads = decode(frames)
        if isinstance(record, Hello):
            self._hellos[record.rank] = record
            self._lost.discard(record.rank)
        elif isinstance(record, RunCell):
            self._begin(record, head.get("ago", 0.0))
        elif isinstance(record, RunMember):
            if self._ensemble != record.ensemble:
                self.end()
                self._ensemble = record.ensemble
                print(f"{self.whose} runs an ensemble, which is shown there.", flush=True)
        elif self._view is not None:
            self._take(self._view, record, payloads)

    def _begin(self, cell: RunCell, ago: float) -> None:
        if self._view is not None and cell.cell == self.cell:
            return  # it is told again where something was lost
        self.end()
        self.cell, self._ensemble = cell.cell, ""
        self._ranks = cell.ranks or tuple(sorted(self._hellos))
        self._replies.clear()
        name = cell.label.removeprefix("cell ")
        since = f", began {ago:.0f} s ago; its output from now on" if ago else ""
        print(f"{name} of {self.whose}, on {label(self._ranks)}{since}:", flush=True)
        hellos = [self._hellos[rank] for rank in self._ranks if rank in self._hellos]
        self._view = cell_view("auto", hellos, None, ago=ago)
        for rank in self._lost.intersection(self._ranks):
            self._view.left(rank, "lost")

    def _take(self, view: View, record: Record, payloads: list[bytes]) -> None:
        if isinstance(record, Died):
            self._lost.add(record.rank)
            view.left(record.rank, "lost")
            view.notice(f"rank {record.rank} {record.how}")
        elif isinstance(record, Output):
            if record.cell == self.cell:
                view.output(replace(record, entries=tuple(map(_without_widget, record.entries))))
        elif isinstance(record, Prompt):
            view.notice(f"rank {record.rank} asks for input in {self.whose}: {record.text}")
        elif isinstance(record, Points | Pulse | Strip | Timings):
            view.telemetry(record, payloads)
        elif isinstance(record, Reply) and record.cell == self.cell:
            if record.rank not in self._replies:
                view.left(record.rank, record.shown_status)
            self._replies[record.rank] = record
        if self.cell and set(self._ranks) <= set(self._replies) | self._lost:
            self.end()

    def refresh(self) -> None:
        """Shows what is new."""
        if self._view is not None:
            self._view.refresh()

    def end(self) -> None:
        """Ends the cell that is shown: all ranks have left it, or nothing more is heard of it."""
        view, self._view = self._view, None
        if view is None:
            return
        view.finish()
        reports = [reply.report for _, reply in sorted(self._replies.items()) if reply.report]
        if reports:
            print(failures.describe(reports, self._ranks), flush=True)

    def _say(self, text: str) -> None:
        if self._view is not None:
            self._view.notice(text)
        else:
            print(text, flush=True)

    def _logs(self) -> str:
        log = next((hello.log for hello in self._hellos.values()), "")
        return f" in {log.rpartition('/')[0]}" if log else ""


def _without_widget(entry: list[Any]) -> list[Any]:
    """Returns a display as its text: its widget lives in the other notebook."""
    kind, *rest = entry
    if kind in ("display", "update", "result") and VIEW in rest[0]:
        return [kind, {mime: data for mime, data in rest[0].items() if mime != VIEW}, *rest[1:]]
    return entry
