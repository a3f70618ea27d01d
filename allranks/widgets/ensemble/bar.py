"""A bar that says how many of many calls have ended, above what they write."""

from __future__ import annotations

import time

from allranks.widgets import bar
from allranks.widgets.dashboard.numbers import seconds
from allranks.widgets.ensemble.view import TextEnsemble
from allranks.widgets.front_end import NOTEBOOK, front_end
from allranks.widgets.notebook import NotebookView
from allranks.widgets.terminal import TerminalView

_PERIOD_SECONDS = 0.2


class BarView(TextEnsemble):
    """Shows what items write, and above it a bar.

    Args:
        text: what shows their text.
        count: how many items there are.
        name: what is called for each.
    """

    def __init__(self, text: NotebookView | TerminalView, count: int, name: str) -> None:
        super().__init__(text, table=False)
        self._count, self._name = count, name
        self._began = time.monotonic()
        self._next = self._began + _PERIOD_SECONDS
        self._shown = ""

    def refresh(self) -> None:
        """Shows what is new."""
        super().refresh()
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PERIOD_SECONDS
            self._show(self.members.said.partition("; ")[2])

    def finish(self) -> None:
        """Shows everything."""
        self._show(f"in {seconds(time.monotonic() - self._began)}")
        super().finish()

    def _show(self, said: str) -> None:
        counts = self.members.counts()
        failed = counts.get("failed", 0)
        done = counts.get("finished", 0) + failed
        head = f"{self._name}: {done:,} of {self._count:,}"
        tail = f"{f', {failed:,} failed' if failed else ''}{f', {said}' if said else ''}"
        line = bar.line(head, done, self._count, tail)
        if line == self._shown:
            return
        self._shown = line
        if isinstance(self._text, NotebookView):
            self._text.show_panel(bar.data(head, done, self._count, tail))
        else:
            bar.on_terminal(line, end="\n" if said.startswith("in ") else "")


def bar_view(count: int, name: str) -> BarView:
    """Returns the bar that fits this front end, for so many calls of a function of that name."""
    kind = NotebookView if front_end() == NOTEBOOK else TerminalView
    return BarView(kind([], noun="item"), count, name)
