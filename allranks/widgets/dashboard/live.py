"""What a live view and its page say to each other: news down, clicks up."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from allranks.widgets.dashboard.figures import Figures
from allranks.widgets.dashboard.logs import BEHIND_NBYTES, PIECE_NBYTES, Logs
from allranks.widgets.dashboard.still import memory_page

if TYPE_CHECKING:
    from allranks.widgets.dashboard.profiled import Profiled
    from allranks.widgets.dashboard.widget import DashboardWidget

_WIDGET = "application/vnd.jupyter.widget-view+json"
_NEWS_SECONDS = 0.1
#: With more than a tenth of them news go less often: the kernel has cells to look after as well.
_RANKS_A_SECOND = 160
_TIMINGS_SECONDS = 0.5
#: Where the ranks' time goes, while somebody looks; and their memory, which is a whole picture.
_STRIPS_SECONDS, _MEMORY_SECONDS = 1.0, 3.0
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
        #: Whether the ranks are another notebook's, and nothing is asked of them here.
        self.watched = False
        self.clicks: deque[dict[str, Any]] = deque()
        #: What a reader has chosen on the page, as the page tells it.
        self.settings: dict[str, Any] = {}
        #: By which the output that stays finds the view on the page.
        self.key = secrets.token_hex(8)
        #: Where the cell may be profiled from the page.
        self.profiled: Profiled | None = None
        self._mode = mode
        self._lock = threading.RLock()
        self._number = 0
        self._heard = self._ended = False
        self._next_news = 0.0
        self._next_timings = self._next_strips = self._next_memory = 0.0
        self._memory = ""
        self._widget: DashboardWidget | None = None

    @property
    def looks_at_time(self) -> bool:
        """Whether a reader has opened where the ranks' time goes."""
        return "time" not in self.settings.get("closed", ["time"])

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

    def end(self) -> None:
        """Sends the rest: the cell has ended, and a page that has everything goes on showing it."""
        self._ended = True
        if self._widget is None:
            return
        self.refresh(final=True)
        # A page that nobody has heard of was not sent the logs.
        if self._heard or not self.with_logs:
            self.say(ended=True, elapsed=self.figures.elapsed)

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
                "key": self.key,
                "settings": self.settings,
                "mode": self._mode,
                "watched": self.watched,
                "noun": self.figures.noun,
                "title": self.figures.title,
                "members": self.figures.members.everything() if self.figures.members else None,
                "withLogs": self.with_logs,
                "paths": self.logs.paths,
                "elapsed": self.figures.elapsed,
                "ranks": self.figures.tiles.everything(),
                "said": self.figures.tiles.said(),
                "curves": heads,
                "points": points,
                "timings": self.figures.timings.told() if self.figures.timings else None,
                "strips": self.figures.strips.everything() if self._has_strips else None,
                "memory": memory_page(self.figures) if self._ended else self._memory,
                "profiles": self.profiled is not None,
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
        """Sends what is new, at most ten times a second, and less often of many ranks."""
        now = time.monotonic()
        if not final and now < self._next_news:
            return
        seconds = _NEWS_SECONDS if self._heard else _UNHEARD_SECONDS
        self._next_news = now + max(seconds, len(self.figures.tiles.tiles) / _RANKS_A_SECOND)
        with self._lock:
            message: dict[str, Any] = {}
            buffers: list[bytes] = []
            tiles = self.figures.tiles.news()
            if tiles:
                message["ranks"], message["said"] = tiles, self.figures.tiles.said()
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
                pieces = self.logs.read(PIECE_NBYTES if final else BEHIND_NBYTES)
                if pieces:
                    message["logs"] = [
                        {"rank": p.rank, "spans": p.err_spans, "skipped": p.skipped} for p in pieces
                    ]
                    buffers += [piece.text for piece in pieces]
            self._add_time(message, now, final)
            if message:
                self._send({**message, "elapsed": self.figures.elapsed}, buffers)

    @property
    def _has_strips(self) -> bool:
        return bool(self.figures.strips) and self.figures.noun == "rank"

    def _add_time(self, message: dict[str, Any], now: float, final: bool) -> None:
        """Adds where the ranks' time and memory went: while a reader looks, and at the end."""
        if not final and not self.looks_at_time:
            return
        strips = self.figures.strips
        if self._has_strips and (final or (strips.changed and now >= self._next_strips)):
            self._next_strips = now + _STRIPS_SECONDS
            message["strips"] = strips.everything() if final else strips.news()
        if final or now >= self._next_memory:
            self._next_memory = now + _MEMORY_SECONDS
            memory = memory_page(self.figures)
            if memory != self._memory:
                self._memory = message["memory"] = memory

    def _send(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        self._number += 1
        self.widget().send({**message, "seq": self._number}, buffers)
