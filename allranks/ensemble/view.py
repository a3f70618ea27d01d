"""The views of an ensemble and of a map: the members' output, a panel or a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from allranks.ensemble.pictures import MemberRow, MemberTable, bundle
from allranks.records.telemetry import Points, Pulse
from allranks.records.wire import Hello, Output
from allranks.widgets.dashboard.cell_model import CellModel, Logs, Tiles
from allranks.widgets.dashboard.svg import PlotStyle
from allranks.widgets.dashboard.tables import seconds
from allranks.widgets.dashboard.view import Ask, LivePanel, handle_click
from allranks.widgets.displays import bar_data, bar_line, rewrite_line
from allranks.widgets.notebook import NotebookView
from allranks.widgets.text import NOTEBOOK, Data, TerminalView, front_end

#: Handles a click: ``add`` or ``stop``, and its value; returns the message for the page.
ClickHandler = Callable[[str, Any], str]
_SHOW_AFTER_SECONDS = 0.3
_PERIOD_SECONDS = 0.2


class TextEnsemble:
    """Shows the members' output, and a table at the end.

    ``lines`` adds a line for each member that ends.
    """

    def __init__(
        self, text: NotebookView | TerminalView, *, lines: bool = False, table: bool = True
    ) -> None:
        self.members = MemberTable()
        self.figures = CellModel([], self.members)
        self._text = text
        self._lines = lines
        self._table = table

    def ranks(self, hellos: Sequence[Hello]) -> None:
        # From now on these ranks run the members.
        self.figures.tiles = Tiles(hellos)
        self.figures.ranks = tuple(hello.rank for hello in hellos)

    def row(self, row: MemberRow) -> None:
        before = self.members.rows.get(row.number)
        self.members.put(row)
        ended = row.state not in ("waiting", "running")
        if self._lines and ended and before is not None and before.state != row.state:
            where = "" if row.rank is None else f" on rank {row.rank}"
            took = "" if row.seconds is None else f" in {seconds(row.seconds)}"
            value = f": {self.members.metric} {row.metric:.6g}" if row.metric is not None else ""
            value = f": {row.error}" if row.error else value
            self._text.say(f"member {row.number} ({row.values}) {row.state}{where}{took}{value}")

    def again(self, member: int) -> None:
        self.figures.curves.forget(member)

    def works_on(self, rank: int, member: int | None) -> None:
        self.figures.tiles.works_on(rank, member)

    def output(self, member: int, batch: Output, log: str) -> None:
        self._text.log_of[member] = log
        self._text.output(replace(batch, rank=member))

    def points(self, member: int, record: Points, payload: bytes) -> None:
        self.figures.curves.take(replace(record, rank=member), payload)

    def pulse(self, record: Pulse) -> None:
        self.figures.tiles.take(record)

    def notice(self, text: str) -> None:
        self._text.say(text)

    def refresh(self) -> None:
        self._text.refresh()

    def finish(self) -> None:
        self.figures.end()
        self._text.finish()
        if self._table:
            self._text.show_text(bundle(self.figures)["text/plain"])


class NotebookEnsemble(TextEnsemble):
    """Shows a live panel above the members' output; the panel stays at the end."""

    _text: NotebookView

    def __init__(self, mode: str, text: NotebookView, act: ClickHandler, ask: Ask) -> None:
        super().__init__(text, table=False)
        self._act, self._ask = act, ask
        self._live = LivePanel(self.figures, Logs([]), mode)
        self._shown = False
        self._show_at = time.monotonic() + _SHOW_AFTER_SECONDS

    def refresh(self) -> None:
        # An ensemble that is over in a moment needs no panel.
        if not self._shown and time.monotonic() >= self._show_at:
            self._shown = True
            self._text.show_panel(self._live.panel(self.members.said))
        self._text.refresh()
        if self._shown:
            while self._live.clicks:
                self._clicked(self._live.clicks.popleft())
            self._live.refresh()

    def finish(self) -> None:
        self.figures.end()
        self._live.end()
        picture = bundle(self.figures, PlotStyle.of(self._live.settings))
        self._text.show_panel(self._live.saved(picture))
        self._text.finish()
        self._live.close()

    def outputs(self) -> list[tuple[Data, Data]]:
        return self._text.outputs()

    def _clicked(self, click: dict[str, Any]) -> None:
        kind = click.get("kind")
        if kind in ("add", "stop"):
            self._live.say(answer=self._act(kind, click.get("what")))
        else:
            handle_click(click, self._live, self._ask)


def ensemble_view(mode: str, act: ClickHandler, ask: Ask, *, fold: bool = True) -> TextEnsemble:
    if front_end() != NOTEBOOK:
        return TextEnsemble(TerminalView([], fold=fold, noun="member"), lines=True)
    text = NotebookView([], fold=fold, noun="member")
    return TextEnsemble(text) if mode == "plain" else NotebookEnsemble(mode, text, act, ask)


class BarView(TextEnsemble):
    """Shows the items' output, and a progress bar above it."""

    def __init__(self, text: NotebookView | TerminalView, count: int, name: str) -> None:
        super().__init__(text, table=False)
        self._count, self._name = count, name
        self._began = time.monotonic()
        self._next = self._began + _PERIOD_SECONDS
        self._shown = ""

    def refresh(self) -> None:
        super().refresh()
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PERIOD_SECONDS
            self._show(self.members.said.partition("; ")[2])

    def finish(self) -> None:
        self._show(f"in {seconds(time.monotonic() - self._began)}")
        super().finish()

    def _show(self, said: str) -> None:
        counts = self.members.counts()
        failed = counts["failed"]
        done = counts["finished"] + failed
        head = f"{self._name}: {done:,} of {self._count:,}"
        tail = f"{f', {failed:,} failed' if failed else ''}{f', {said}' if said else ''}"
        line = bar_line(head, done, self._count, tail)
        if line == self._shown:
            return
        self._shown = line
        if isinstance(self._text, NotebookView):
            self._text.show_panel(bar_data(head, done, self._count, tail))
        else:
            rewrite_line(line, end="\n" if said.startswith("in ") else "")


def bar_view(count: int, name: str) -> BarView:
    kind = NotebookView if front_end() == NOTEBOOK else TerminalView
    return BarView(kind([], noun="item"), count, name)
