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
from typing import Any

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
    panel_files,
    section_html,
    summary,
    text,
    with_panel,
)
from allranks.widgets.dashboard.svg import PlotStyle
from allranks.widgets.dashboard.tables import timings_page
from allranks.widgets.displays import VIEW, ProgressLine, bar_data
from allranks.widgets.notebook import NotebookView
from allranks.widgets.text import NOTEBOOK, Data, TerminalView, front_end

_NEWS_SECONDS = 0.1
#: With more ranks than a tenth of this, changes are sent less often: the kernel also runs cells.
_RANKS_A_SECOND = 160
_TIMINGS_SECONDS = 0.5
#: How often the ranks' time is sent while its section is open, and their memory, a whole picture.
_STRIPS_SECONDS, _MEMORY_SECONDS = 1.0, 3.0
#: Before the first message of a page, changes are sent less often, and no logs.
_UNHEARD_SECONDS = 0.5


def _make_widget(snapshot: Callable[[], Data], clicked: Callable[[Data], None]) -> Any:
    """Returns the model behind a live panel. Both functions may be called from another thread.

    News are messages, numbered from 1. The state is made when a page asks for it: it holds the
    content of all messages up to its number, in as few bytes as possible.
    """
    # Imported here: anywidget loads ipywidgets, which takes longer than a short cell.
    import anywidget
    import traitlets

    class DashboardWidget(anywidget.AnyWidget):
        _esm, _css = panel_files()
        state = traitlets.Dict().tag(sync=True, to_json=lambda *_: snapshot())

    widget = DashboardWidget()
    widget.on_msg(lambda _widget, content, _buffers: clicked(content))
    return widget


class LivePanel:
    """Keeps the widget of one cell up to date; ``mode`` is ``auto`` or ``full``."""

    def __init__(self, figures: CellModel, logs: Logs, mode: str) -> None:
        self.figures = figures
        self.logs = logs
        self.with_logs = mode == "full"
        #: Whether the ranks are another notebook's, and nothing is asked of them here.
        self.watched = False
        self.clicks: deque[Data] = deque()
        #: The reader's choices on the page.
        self.settings: Data = {}
        #: By which the output that stays finds the view on the page.
        self.key = secrets.token_hex(8)
        #: Profiles the cell; None if it cannot be profiled from the page.
        self.profile: Callable[[], None] | None = None
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
        self._widget: Any = None

    @property
    def looks_at_time(self) -> bool:
        # Whether a reader has opened that section.
        return "time" not in self.settings.get("closed", ["time"])

    def widget(self) -> Any:
        if self._widget is None:
            self._widget = _make_widget(self.snapshot, self.clicks.append)
        return self._widget

    def panel(self, text: str) -> Data:
        """Returns the widget as a display's data, with a text for pages that show no widgets."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget().model_id}
        return {VIEW: view, "text/plain": text}

    def end(self) -> None:
        # A page that has everything goes on showing it.
        self._ended = True
        if self._widget is None:
            return
        self.refresh(final=True)
        # A page from which no message came was not sent the logs.
        if self._heard or not self.with_logs:
            self.say(ended=True, elapsed=self.figures.elapsed)

    def saved(self, picture: dict[str, str]) -> dict[str, str]:
        logs = self.logs if self.with_logs else None
        return with_panel(picture, self.snapshot(), self.figures, logs)

    def close(self) -> None:
        if self._widget is not None:
            self._widget.close()

    def snapshot(self) -> Data:
        # All that a page needs to show the present state.
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
                "timings": timings_page(self.figures.timings) if self.figures.timings else None,
                "strips": self.figures.strips.everything() if self._has_strips else None,
                "memory": memory_page(self.figures) if self._ended else self._memory,
                "sections": self._section_pages() if self._ended else self._sections,
                "profiles": self.profile is not None,
            }

    def greet(self) -> None:
        # A page listens, or has missed something: it is sent everything.
        with self._lock:
            self._heard = True
            self.logs.rewind()
            state = self.snapshot()
            points = state.pop("points")
            self._send({**state, "anew": True}, [points])

    def say(self, **message: Any) -> None:
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
            message: Data = {}
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
                message["timings"] = timings_page(timings)
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

    def _add_time(self, message: Data, now: float, final: bool) -> None:
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

    def _add_sections(self, message: Data, now: float, final: bool) -> None:
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

    def _send(self, message: Data, buffers: list[bytes]) -> None:
        self._number += 1
        self.widget().send({**message, "seq": self._number}, buffers)


#: Makes a request of ranks: its name, its arguments, what takes each answer, and which ranks. The
#: answers are delivered later.
Ask = Callable[[str, Data, Callable[[Answer], None], Iterable[int]], None]


def handle_click(click: Data, live: LivePanel, ask: Ask) -> None:
    kind = click.get("kind")
    if kind == "ready":
        live.greet()
    elif kind == "where":
        for name in (requests.STATUS, requests.STACK):
            ask(name, {}, partial(_say_where, live, name), live.figures.ranks)
    elif kind == "profile" and live.profile is not None:
        live.profile()
    elif kind == "settings" and isinstance(click.get("settings"), dict):
        # Kept for the picture, and for other pages.
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
    """Asks the ranks of a cell to report their time while the section is open."""

    def __init__(self, figures: CellModel) -> None:
        self._figures = figures
        self._looks = False
        self._wait, self._again_at = _AGAIN_SECONDS, 0.0

    def update(self, looks: bool, ask: Ask) -> None:
        if not (looks or self._looks):
            return  # as nearly always: this is called with every message
        now, strips = time.monotonic(), self._figures.strips
        ranks = [tile.rank for tile in self._figures.tiles.tiles.values() if not tile.gone]
        if looks != self._looks:
            self._looks, self._wait = looks, _AGAIN_SECONDS
        elif now >= self._again_at:
            self._wait *= 2
            since = self._figures.elapsed - _AGAIN_SECONDS
            ranks = [rank for rank in ranks if strips.seconds(rank) < since]
        else:
            return
        self._again_at = now + self._wait
        if ranks:
            ask(requests.STRIPS, {"bins": strips.bins if looks else 0}, lambda _: None, ranks)


PROFILE_SECONDS = 5.0
#: Profiles the running cell for some seconds, and passes on the profiles of its ranks. Returns
#: why that is not possible, or "".
Profiler = Callable[[Callable[[Data | None], object], float], str]

_PROFILE_BEGUN = f"profiling the next {PROFILE_SECONDS:g} s"
_PROFILE_BELOW = "the flame graph is below"
_NO_PROFILE = "no rank could be looked at in this cell: there is no flame graph"


def begin_profile(profiler: Profiler, live: LivePanel, show: Callable[[Data], object]) -> None:
    """Profiles the cell for some seconds; ``show`` shows the picture."""

    def take(picture: Data | None) -> None:
        if picture is not None:
            show(picture)
        live.say(profiled=_NO_PROFILE if picture is None else _PROFILE_BELOW)

    live.say(profiled=profiler(take, PROFILE_SECONDS) or _PROFILE_BEGUN)


#: A cell with hidden output that runs for longer than this has a panel, to search the output.
_MUCH_TEXT_SECONDS = 1.0
#: A display cannot be taken away, and nbconvert warns of one that has no data.
_NOTHING = {"text/html": "", "text/plain": ""}


class Dashboard:
    """Shows a cell's text, and above it a live panel that stays when the cell has ended.

    See ``cell_view`` for the arguments.
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
            self._live.profile = partial(begin_profile, profiler, self._live, text.show_below_panel)
        self._strip_requests = StripRequests(self.figures)
        self._live.watched = ask is None
        self._text = text
        # No page of another notebook has a button that asks its ranks.
        self._ask: Ask = ask or (lambda *_: None)
        self._full = self.figures.memory.asked = mode == "full"
        self._shown = self._with_imports = self._hidden = False

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
        much = self._hidden and self.figures.elapsed >= _MUCH_TEXT_SECONDS
        if not self._shown and (self._full or much or self.figures.worth_showing()):
            self._shown = True
            self._text.show_panel(self._live.panel(summary(self.figures)))
        if not self._shown:
            self._show_imports()
        self._text.refresh()
        if self._shown:
            while self._live.clicks:
                handle_click(self._live.clicks.popleft(), self._live, self._ask)
            self._strip_requests.update(self._live.looks_at_time, self._ask)
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


class TerminalDashboard(TerminalView):
    """Prints the ranks' output, then their last values and timings, if any.

    The mode ``full`` prints the tables in any case.
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
        mode: ``plain`` for labelled text; ``auto`` for a panel when it has something to show;
            ``full`` for a panel with everything, from the start.
        hellos: the ranks that run the cell.
        ask: makes a request of ranks; None if they are another notebook's.
        fold: whether identical output of several ranks is shown once.
        ago: how many seconds ago the cell began.
        profiler: profiles the running cell; None for a panel without a button for it.
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
