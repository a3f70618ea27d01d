"""One line with a progress bar: while ranks start, import a module or end their work."""

from __future__ import annotations

import sys
import time
from html import escape

from allranks.records.ranks import label
from allranks.records.telemetry import Pulse
from allranks.widgets.displays import Data, Shown
from allranks.widgets.front_end import NOTEBOOK, TERMINAL, front_end

_WIDTH = 30
_SHOW_AFTER_SECONDS = 1.0


def bar_line(head: str, done: int, total: int, tail: str) -> str:
    """Returns a bar between words, as text."""
    full = _WIDTH * done // max(1, total)
    return f"{head} {'█' * full}{'░' * (_WIDTH - full)}{tail}"


def bar_data(head: str, done: int, total: int, tail: str) -> Data:
    """Returns a bar between words, as a display's data."""
    meter = f'<meter value="{done}" max="{max(1, total)}"></meter>'
    html = f"<p>{escape(head)} {meter}{escape(tail)}</p>"
    return {"text/plain": bar_line(head, done, total, tail), "text/html": html}


def rewrite_line(text: str, end: str = "") -> None:
    """Writes a line over the one before, where somebody sees that."""
    try:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{text}\x1b[K{end}")
            sys.stderr.flush()
    except (AttributeError, ValueError):
        pass  # there is no such stream, or it is closed


class ProgressLine:
    """A bar that is there while something goes on, and gone when it has ended."""

    def __init__(self) -> None:
        self._where = front_end()
        self._shown = Shown([])
        self._show_at = time.monotonic() + _SHOW_AFTER_SECONDS
        self._drawn = False

    def show(self, head: str, done: int, total: int, tail: str) -> None:
        """Shows how far it is, once it has gone on for a second."""
        if time.monotonic() < self._show_at:
            return
        self._drawn = True
        if self._where == NOTEBOOK:
            self._shown.show(bar_data(head, done, total, tail))
        elif self._where == TERMINAL:
            rewrite_line(bar_line(head, done, total, tail))

    def end(self) -> None:
        """Takes it away."""
        if not self._drawn:
            return
        if self._where == NOTEBOOK:
            # A display cannot be taken away, and nbconvert warns of one that has no data.
            self._shown.show({"text/html": "", "text/plain": ""})
        elif self._where == TERMINAL:
            rewrite_line("")


class Imports:
    """Which ranks import what, and which of them are through with it."""

    def __init__(self) -> None:
        self._now: dict[int, str] = {}
        self._ranks: dict[str, set[int]] = {}

    def take(self, pulse: Pulse) -> None:
        """Takes in what a rank imports now, if anything."""
        self._now[pulse.rank] = pulse.importing
        if pulse.importing:
            self._ranks.setdefault(pulse.importing, set()).add(pulse.rank)

    def left(self, rank: int) -> None:
        """Takes in that a rank has left the cell."""
        self._now[rank] = ""

    def line(self) -> tuple[str, int, int] | None:
        """Returns what is imported on which ranks, and how many of how many are through with it.

        None where nothing is imported. Of several modules it is the one that most ranks wait for.
        """
        busy = [module for module in self._now.values() if module]
        if not busy:
            return None
        module = max(dict.fromkeys(busy), key=busy.count)
        ranks = self._ranks[module]
        done = sum(self._now[rank] != module for rank in ranks)
        return f"importing {module} on {label(sorted(ranks))}", done, len(ranks)
