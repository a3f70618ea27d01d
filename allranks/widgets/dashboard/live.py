"""The live panel: what it sends to its page, and what it does with the page's clicks."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from allranks.records import requests
from allranks.records.profile import Profile
from allranks.records.wire import Answer
from allranks.widgets.dashboard.cell_model import CellModel
from allranks.widgets.dashboard.logs import BEHIND_NBYTES, PIECE_NBYTES, Logs
from allranks.widgets.dashboard.still import memory_page, section_html
from allranks.widgets.displays import Data

if TYPE_CHECKING:
    from allranks.widgets.page_widgets import DashboardWidget

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

    def __init__(self, figures: CellModel, logs: Logs, mode: str) -> None:
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
        #: As HTML, by their titles: the sections that were added, as a page has them.
        self._sections = {section.title: "" for section in figures.sections}
        self._next_sections = 0.0
        self._widget: DashboardWidget | None = None

    @property
    def looks_at_time(self) -> bool:
        """Whether a reader has opened where the ranks' time goes."""
        return "time" not in self.settings.get("closed", ["time"])

    def widget(self) -> DashboardWidget:
        """Returns the widget, made now if there is none."""
        if self._widget is None:
            from allranks.widgets.page_widgets import DashboardWidget

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
                "sections": self._section_pages() if self._ended else self._sections,
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
            self._add_sections(message, now, final)
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

    def _add_sections(self, message: dict[str, Any], now: float, final: bool) -> None:
        """Adds the sections that have changed, at most once in three seconds."""
        if not self._sections or not (final or now >= self._next_sections):
            return
        self._next_sections = now + _MEMORY_SECONDS
        made = self._section_pages()
        changed = {title: html for title, html in made.items() if html != self._sections[title]}
        if changed:
            message["sections"] = changed
            self._sections = made

    def _section_pages(self) -> dict[str, str]:
        return {section.title: section_html(section) for section in self.figures.sections}

    def _send(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        self._number += 1
        self.widget().send({**message, "seq": self._number}, buffers)


#: Makes a request of ranks: its name, its arguments, what takes each answer, and which ranks.
Ask = Callable[[str, dict[str, Any], Callable[[Answer], None], Iterable[int]], None]


def act(click: dict[str, Any], live: Live, ask: Ask) -> None:
    """Does what was clicked: where the ranks are, profile, interrupt, or a page that has come up.

    Settings are kept, for the picture and for other pages.

    Args:
        click: what the page said.
        live: the view that it belongs to.
        ask: makes a request of ranks whose answers are delivered later.
    """
    kind = click.get("kind")
    if kind == "ready":
        live.greet()
    elif kind == "where":
        for name in (requests.STATUS, requests.STACK):
            ask(name, {}, partial(_say_where, live, name), live.figures.ranks)
    elif kind == "profile" and live.profiled is not None:
        live.profiled.begin()
    elif kind == "settings" and isinstance(click.get("settings"), dict):
        live.settings = click["settings"]
    elif kind == "interrupt" and not live.watched:
        # From pages that cannot ask the server to interrupt the kernel.
        signal.raise_signal(signal.SIGINT)


def _say_where(live: Live, name: str, answer: Answer) -> None:
    live.say(where={"rank": answer.rank, "what": name, **answer.content})


#: A rank that has told nothing for so long is asked again: it may have come to the cell later, or
#: in the place of one that died. Each time the wait is twice as long.
_AGAIN_SECONDS = 3.0


class Watching:
    """Whether the ranks of a cell have been asked to tell.

    Args:
        figures: what they have told.
    """

    def __init__(self, figures: CellModel) -> None:
        self._figures = figures
        self._looks = False
        self._wait, self._again_at = _AGAIN_SECONDS, 0.0

    def step(self, looks: bool, ask: Ask) -> None:
        """Asks whom it has to ask, now that somebody looks or does not."""
        if not (looks or self._looks):
            return  # as nearly always: this is called with every message
        now, strips = time.monotonic(), self._figures.strips
        if looks != self._looks:
            self._looks, self._wait, self._again_at = looks, _AGAIN_SECONDS, now + _AGAIN_SECONDS
            self._ask(ask, strips.bins if looks else 0, self._running())
        elif now >= self._again_at:
            self._wait *= 2
            self._again_at = now + self._wait
            since = self._figures.elapsed - _AGAIN_SECONDS
            silent = [rank for rank in self._running() if strips.seconds(rank) < since]
            self._ask(ask, strips.bins, silent)

    def _running(self) -> list[int]:
        return [tile.rank for tile in self._figures.tiles.tiles.values() if not tile.gone]

    def _ask(self, ask: Ask, bins: int, ranks: list[int]) -> None:
        if ranks:
            ask(requests.STRIPS, {"bins": bins}, lambda _: None, ranks)


PROFILE_SECONDS = 5.0
#: Has the running cell profiled for so many seconds, and shows what its ranks have seen: returns
#: why that is not possible, or "".
Profiler = Callable[[Callable[[Sequence[Profile]], object], float], str]

_PROFILE_BEGUN = f"profiling the next {PROFILE_SECONDS:g} s"
_PROFILE_BELOW = "the flame graph is below"
_NO_PROFILE = "no rank could be looked at in this cell: there is no flame graph"


class Profiled:
    """Profiles of one cell, taken from its panel.

    Args:
        profiler: takes them.
        show: shows a picture below the panel.
        say: tells pages of it.
    """

    def __init__(
        self, profiler: Profiler, show: Callable[[Data], object], say: Callable[..., Any]
    ) -> None:
        self._profiler = profiler
        self._show = show
        self._say = say

    def begin(self) -> None:
        """Begins one, if none is being taken."""
        problem = self._profiler(self._take, PROFILE_SECONDS)
        self._say(profiled=problem or _PROFILE_BEGUN)

    def _take(self, profiles: Sequence[Profile]) -> None:
        if not profiles:
            self._say(profiled=_NO_PROFILE)
            return
        # Nobody has it in memory who has taken no profile.
        from allranks.widgets.flame_graph import bundle

        self._show(bundle(profiles))
        self._say(profiled=_PROFILE_BELOW)
