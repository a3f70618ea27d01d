"""One line with a bar, for what takes more than a second."""

from __future__ import annotations

import sys
import time
from html import escape

from allranks.widgets.front_end import NOTEBOOK, TERMINAL, front_end
from allranks.widgets.shown import Data, Shown

_WIDTH = 30
_SHOW_AFTER_SECONDS = 1.0


def line(head: str, done: int, total: int, tail: str) -> str:
    """Returns a bar between words, as text."""
    full = _WIDTH * done // max(1, total)
    return f"{head} {'█' * full}{'░' * (_WIDTH - full)}{tail}"


def data(head: str, done: int, total: int, tail: str) -> Data:
    """Returns a bar between words, as a display's data."""
    meter = f'<meter value="{done}" max="{max(1, total)}"></meter>'
    html = f"<p>{escape(head)} {meter}{escape(tail)}</p>"
    return {"text/plain": line(head, done, total, tail), "text/html": html}


def on_terminal(text: str, end: str = "") -> None:
    """Writes a line over the one before, where somebody sees that."""
    try:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{text}\x1b[K{end}")
            sys.stderr.flush()
    except (AttributeError, ValueError):
        pass  # there is no such stream, or it is closed


class Passing:
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
            self._shown.show(data(head, done, total, tail))
        elif self._where == TERMINAL:
            on_terminal(line(head, done, total, tail))

    def end(self) -> None:
        """Takes it away."""
        if not self._drawn:
            return
        if self._where == NOTEBOOK:
            # A display cannot be taken away, and nbconvert warns of one that has no data.
            self._shown.show({"text/html": "", "text/plain": ""})
        elif self._where == TERMINAL:
            on_terminal("")
