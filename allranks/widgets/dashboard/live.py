"""What a live view and its page say to each other: news down, clicks up."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from allranks.widgets.dashboard.figures import Figures
from allranks.widgets.dashboard.logs import Logs

if TYPE_CHECKING:
    from allranks.widgets.dashboard.widget import DashboardWidget

_WIDGET = "application/vnd.jupyter.widget-view+json"
_NEWS_SECONDS = 0.1
_TIMINGS_SECONDS = 0.5
#: Until a page has said that it listens, news go less often, and nothing of the logs.
_UNHEARD_SECONDS = 0.5


class Live:
    """Keeps the widget of one cell up to date.

    Args:
        figures: what there is to show.
        logs: the output of its ranks.
        mode: ``auto`` or ``full``.
    """

    def __init__(self, figures: Figures, logs: Logs, mode: str) -> None:
        self.figures = figures
        self.logs = logs
        self.with_logs = mode == "full"
        self.clicks: deque[dict[str, Any]] = deque()
        self._mode = mode
        self._lock = threading.RLock()
        self._number = 0
        self._heard = False
        self._next_news = 0.0
        self._next_timings = 0.0
        self._widget: DashboardWidget | None = None

    def widget(self) -> DashboardWidget:
        """Returns the widget, made now if there is none."""
        if self._widget is None:
            from allranks.widgets.dashboard.widget import DashboardWidget

            self._widget = DashboardWidget(self.snapshot, self.clicks.append)
        return self._widget

    def panel(self, text: str) -> dict[str, Any]:
        """Returns the widget as a display's data, with a text for pages that show no widgets."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget().model_id}
        return {_WIDGET: view, "text/plain": text}

    def close(self) -> None:
        """Ends the widget on every page."""
        if self._widget is not None:
            self._widget.close()

    def snapshot(self) -> dict[str, Any]:
        """Returns all that a page needs to show the present state."""
        with self._lock:
            heads, points = self.figures.curves.everything()
            return {
                "seq": self._number,
                "mode": self._mode,
                "noun": self.figures.noun,
                "members": self.figures.members.everything() if self.figures.members else None,
                "withLogs": self.with_logs,
                "paths": self.logs.paths,
                "elapsed": self.figures.elapsed,
                "ranks": self.figures.tiles.everything(),
                "curves": heads,
                "points": points,
                "timings": self.figures.timings.told() if self.figures.timings else None,
            }

    def greet(self) -> None:
        """A page listens, or has missed something: it is sent everything."""
        with self._lock:
            self._heard = True
            self.logs.rewind()
            state = self.snapshot()
            points = state.pop("points")
            self._send({**state, "anew": True}, [points])

    def say(self, **message: Any) -> None:
        """Sends one thing at once."""
        with self._lock:
            self._send(message, [])

    def refresh(self, final: bool = False) -> None:
        """Sends what is new, at most ten times a second."""
        now = time.monotonic()
        if not final and now < self._next_news:
            return
        self._next_news = now + (_NEWS_SECONDS if self._heard else _UNHEARD_SECONDS)
        with self._lock:
            message: dict[str, Any] = {}
            buffers: list[bytes] = []
            tiles = self.figures.tiles.news()
            if tiles:
                message["ranks"] = tiles
            members = self.figures.members.news() if self.figures.members else None
            if members:
                message["members"] = members
            heads, points = self.figures.curves.news()
            if heads:
                message["curves"] = heads
                buffers.append(points)
            timings = self.figures.timings
            if timings.changed and (final or now >= self._next_timings):
                self._next_timings = now + _TIMINGS_SECONDS
                timings.changed = False
                message["timings"] = timings.told()
            if self.with_logs and self._heard:
                pieces = self.logs.read()
                if pieces:
                    message["logs"] = [
                        {"rank": p.rank, "spans": p.err_spans, "skipped": p.skipped} for p in pieces
                    ]
                    buffers += [piece.text for piece in pieces]
            if message:
                self._send({**message, "elapsed": self.figures.elapsed}, buffers)

    def _send(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        self._number += 1
        self.widget().send({**message, "seq": self._number}, buffers)
