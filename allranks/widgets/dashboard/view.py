"""The views of a cell with a panel: in a notebook live, in a terminal as tables at the end."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from allranks.records import requests
from allranks.records.telemetry import Telemetry
from allranks.records.wire import Answer, Hello, Output
from allranks.widgets.dashboard.cell_model import (
    BEHIND_NBYTES,
    PIECE_NBYTES,
    CellModel,
    Logs,
)
from allranks.widgets.dashboard.saved_panel import (
    bundle,
    memory_page,
    section_html,
    summary,
    text,
    with_panel,
)
from allranks.widgets.dashboard.svg import PlotStyle
from allranks.widgets.displays import ProgressLine, bar_data
from allranks.widgets.notebook import NotebookView
from allranks.widgets.text import NOTEBOOK, Data, TerminalView, front_end

if TYPE_CHECKING:
    from allranks.widgets.page_widgets import DashboardWidget


_WIDGET = "application/vnd.jupyter.widget-view+json"
_NEWS_SECONDS = 0.1
#: With more ranks than a tenth of this, changes are sent less often: the kernel also runs cells.
_RANKS_A_SECOND = 160
_TIMINGS_SECONDS = 0.5
#: How often the ranks' time is sent while its section is open, and their memory, a whole picture.
_STRIPS_SECONDS, _MEMORY_SECONDS = 1.0, 3.0
#: Before the first message of a page, changes are sent less often, and no logs.
_UNHEARD_SECONDS = 0.5


class LivePanel:
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
        #: The reader's choices on the page.
        self.settings: dict[str, Any] = {}
        #: By which the output that stays finds the view on the page.
        self.key = secrets.token_hex(8)
        #: Where the cell may be profiled from the page.
        self.profiled: PanelProfiler | None = None
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
        # A page from which no message came was not sent the logs.
        if self._heard or not self.with_logs:
            self.say(ended=True, elapsed=self.figures.elapsed)

    def saved(self, picture: dict[str, str]) -> dict[str, str]:
        """Returns a picture of the cell, which has ended, with the panel packed beside it."""
        logs = self.logs if self.with_logs else None
        return with_panel(picture, self.snapshot(), self.figures, logs)

    def close(self) -> None:
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


def handle_click(click: dict[str, Any], live: LivePanel, ask: Ask) -> None:
    """Does what was clicked: where the ranks are, profile, interrupt, or a page that has come up.

    Settings are kept, for the picture and for other pages.

    Args:
        click: the page's message.
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


def _say_where(live: LivePanel, name: str, answer: Answer) -> None:
    live.say(where={"rank": answer.rank, "what": name, **answer.content})


#: A rank without a report for this time is asked again: it may have come to the cell later, or
#: in the place of one that died. Each time the wait is twice as long.
_AGAIN_SECONDS = 3.0


class StripRequests:
    """Whether the ranks of a cell have been asked to tell.

    Args:
        figures: the data of the cell.
    """

    def __init__(self, figures: CellModel) -> None:
        self._figures = figures
        self._looks = False
        self._wait, self._again_at = _AGAIN_SECONDS, 0.0

    def update(self, looks: bool, ask: Ask) -> None:
        """Asks ranks to start or to stop reporting, as the section is open or closed."""
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
#: Profiles the running cell for some seconds, and passes on the profiles of its ranks. Returns
#: why that is not possible, or "".
Profiler = Callable[[Callable[[Data | None], object], float], str]

_PROFILE_BEGUN = f"profiling the next {PROFILE_SECONDS:g} s"
_PROFILE_BELOW = "the flame graph is below"
_NO_PROFILE = "no rank could be looked at in this cell: there is no flame graph"


class PanelProfiler:
    """Profiles of one cell, taken from its panel.

    Args:
        profiler: takes them.
        show: shows a picture below the panel.
        say: sends a message to pages.
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

    def _take(self, picture: Data | None) -> None:
        if picture is None:
            self._say(profiled=_NO_PROFILE)
            return
        self._show(picture)
        self._say(profiled=_PROFILE_BELOW)


#: A cell that writes more than is shown, for longer than this, has a panel to search it.
_MUCH_TEXT_SECONDS = 1.0
#: A display cannot be taken away, and nbconvert warns of one that has no data.
_NOTHING = {"text/html": "", "text/plain": ""}


class Dashboard:
    """Shows a cell's text, and above it a live panel that stays when the cell has ended.

    Args:
        mode: ``auto``, where the panel appears when there is something in it, or ``full``.
        hellos: the ranks that run the cell.
        text: what shows their text and their pictures.
        ask: makes a request of ranks whose answers are delivered later; None where the ranks are
            another notebook's.
        profiler: has the cell profiled that runs; without one there is no button for it.
    """

    def __init__(
        self,
        mode: str,
        hellos: Sequence[Hello],
        text: NotebookView,
        ask: Ask | None,
        profiler: Profiler | None = None,
    ) -> None:
        self.figures = CellModel(hellos)
        self._logs = Logs(hellos)
        self._live = LivePanel(self.figures, self._logs, mode)
        if profiler is not None:
            self._live.profiled = PanelProfiler(profiler, text.show_below_panel, self._live.say)
        self._watching = StripRequests(self.figures)
        self._live.watched = ask is None
        self._text = text
        # No page of another notebook has a button that asks its ranks.
        self._ask: Ask = ask or (lambda *_: None)
        self._full = self.figures.memory.asked = mode == "full"
        self._shown = False
        self._with_imports = False
        self._hidden = False

    def output(self, batch: Output) -> None:
        self._logs.take(batch)
        if batch.hidden_lines:
            self._hidden = self._live.with_logs = True
        self._text.output(batch)

    def telemetry(self, record: Telemetry, payloads: list[bytes]) -> None:
        self.figures.take(record, payloads)

    def left(self, rank: int, status: str) -> None:
        self.figures.left(rank, status)
        self._text.left(rank, status)

    def notice(self, text: str) -> None:
        self._text.notice(text)

    def make_way(self) -> None:
        self._text.make_way()

    def refresh(self) -> None:
        if not self._shown and self._has_something():
            self._shown = True
            self._text.show_panel(self._live.panel(summary(self.figures)))
        if not self._shown:
            self._show_imports()
        self._text.refresh()
        if self._shown:
            while self._live.clicks:
                handle_click(self._live.clicks.popleft(), self._live, self._ask)
            self._watching.update(self._live.looks_at_time, self._ask)
            self._live.refresh()

    def finish(self) -> None:
        self.figures.end()
        # A panel for text comes only to a cell that takes its time; what stays is the same for all.
        if self._shown or self._full or self._hidden or self.figures.worth_showing():
            self._live.end()
            picture = bundle(self.figures, PlotStyle.of(self._live.settings))
            self._text.show_panel(self._live.saved(picture))
        elif self._with_imports:
            self._text.show_panel(_NOTHING)
        self._text.finish()
        self._live.close()

    def outputs(self) -> list[tuple[Data, Data]]:
        return self._text.outputs()

    def _show_imports(self) -> None:
        line = self.figures.imports.line()
        if line is not None:
            self._with_imports = True
            self._text.show_panel(bar_data(*line, ""))
        elif self._with_imports:
            self._text.show_panel(_NOTHING)

    def _has_something(self) -> bool:
        much = self._hidden and self.figures.elapsed >= _MUCH_TEXT_SECONDS
        return self._full or much or self.figures.worth_showing()


class TerminalDashboard(TerminalView):
    """Prints what ranks write, then their last values and timings, if there are any.

    Args:
        mode: ``auto`` or ``full``, which prints the tables in any case.
        hellos: the ranks that run the cell.
        log_dir: where their logs are.
        fold: whether identical output of several ranks is printed once.
    """

    def __init__(self, mode: str, hellos: Sequence[Hello], log_dir: str, fold: bool) -> None:
        super().__init__([hello.rank for hello in hellos], log_dir, fold)
        self._full = mode == "full"
        self.figures = CellModel(hellos)
        self._imports_line: ProgressLine | None = None

    def telemetry(self, record: Telemetry, payloads: list[bytes]) -> None:
        self.figures.take(record, payloads)

    def left(self, rank: int, status: str) -> None:
        self.figures.left(rank, status)

    def refresh(self) -> None:
        if self._imports_line is not None:
            self._imports_line.end()
        super().refresh()
        imports = self.figures.imports
        if imports.ranks and (line := imports.line()) is not None:
            self._imports_line = self._imports_line or ProgressLine(self.figures.started)
            self._imports_line.show(*line, "")

    def finish(self) -> None:
        if self._imports_line is not None:
            self._imports_line.end()
        super().finish()
        self.figures.end()
        if self._full or self.figures.worth_showing():
            print(text(self.figures), file=sys.stdout, flush=True)


def text_view(
    ranks: Sequence[int], log_dir: str = "", fold: bool = True
) -> NotebookView | TerminalView:
    """Returns the labelled text view that fits this front end.

    Args:
        ranks: the ranks whose output is shown.
        log_dir: the folder of their logs, for the line about output that is not shown.
        fold: whether identical output of several ranks is shown once.
    """
    kind = NotebookView if front_end() == NOTEBOOK else TerminalView
    return kind(ranks, log_dir, fold)


def cell_view(
    mode: str,
    hellos: Sequence[Hello],
    ask: Ask | None,
    *,
    fold: bool = True,
    ago: float = 0.0,
    profiler: Profiler | None = None,
) -> Dashboard | NotebookView | TerminalDashboard | TerminalView:
    """Returns the view of a cell that fits this front end.

    Args:
        mode: ``plain`` for labelled text; ``auto`` for a panel where there is something in it;
            ``full`` for a panel with everything, from the start.
        hellos: the ranks that run the cell.
        ask: makes a request of ranks while the cell runs; None where they are another notebook's.
        fold: whether identical output of several ranks is shown once.
        ago: how many seconds ago the cell began, where it is not shown from then on.
        profiler: has the cell profiled that runs; without one the panel has no button for it.
    """
    ranks = [hello.rank for hello in hellos]
    log_dir = os.path.dirname(hellos[0].log) if hellos else ""
    if mode == "plain":
        return text_view(ranks, log_dir, fold)
    view: Dashboard | TerminalDashboard
    if front_end() == NOTEBOOK:
        view = Dashboard(mode, hellos, NotebookView(ranks, log_dir, fold), ask, profiler)
    else:
        view = TerminalDashboard(mode, hellos, log_dir, fold)
    view.figures.started -= ago
    return view
