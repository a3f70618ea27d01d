"""The views of a cell with a panel: in a notebook live, in a terminal as tables at the end."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from allranks.errors import AllranksError
from allranks.records import requests
from allranks.records.ranks import RUNNING, Activity
from allranks.records.telemetry import Telemetry
from allranks.records.wire import Answer, Hello, Output
from allranks.widgets.dashboard.cell_model import (
    BEHIND_NBYTES,
    PIECE_NBYTES,
    SECTIONS,
    CellModel,
    Logs,
)
from allranks.widgets.dashboard.plot import PlotStyle
from allranks.widgets.dashboard.saved_panel import (
    bundle,
    memory_page,
    panel_files,
    section_html,
    summary,
    text,
    with_panel,
)
from allranks.widgets.dashboard.tables import timings_page
from allranks.widgets.displays import NOTHING, VIEW, ProgressLine, bar_data, make_widget
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
#: A rank that has not reported its time since then is asked again: it may have begun the cell
#: later, or in the place of one that died. Each time the wait is twice as long.
_AGAIN_SECONDS = 3.0

#: Makes a request of ranks: its name, its arguments, what takes each answer, and which ranks. The
#: answers are delivered later.
Ask = Callable[[str, Data, Callable[[Answer], None], Iterable[int]], None]
#: Handles a click on ``add`` or ``stop``, and its value; returns the message for the page.
ClickHandler = Callable[[str, Any], str]
#: Shows a display below the panel, if there is one, and a line in the panel.
ShowBelow = Callable[[Data | None, str], object]


@dataclass(frozen=True)
class PanelButton:
    """A button that a feature adds to the panel of a cell, as long as the cell runs.

    ``title`` describes what it does. The feature's ``command(show)`` returns a line for the panel;
    it may call ``show``, a `ShowBelow`, later.
    """

    text: str
    title: str
    command: str


#: Buttons, and the functions that act when one is pressed.
Buttons = Mapping[PanelButton, Callable[[ShowBelow], str]]


class LivePanel:
    """Keeps the widget of one cell up to date; ``mode`` is ``auto`` or ``full``.

    News are messages, numbered from 1. The state is made when a page asks for it: it holds the
    content of all messages up to its number, in as few bytes as possible.
    """

    def __init__(self, figures: CellModel, logs: Logs, mode: str) -> None:
        self.figures = figures
        self.logs = logs
        self.with_logs = mode == "full"
        #: None if the ranks are another notebook's, or nothing is asked of them.
        self.ask: Ask | None = None
        #: Adds and stops members.
        self.act: ClickHandler | None = None
        #: Whether the ranks are another notebook's.
        self.watched = False
        self._clicks: deque[Data] = deque()
        #: The reader's choices on the page.
        self.settings: Data = {}
        #: By which the output that stays finds the view on the page.
        self.key = secrets.token_hex(8)
        #: Those of features, by their texts.
        self._buttons: dict[str, tuple[PanelButton, Callable[[], str]]] = {}
        self._mode = mode
        self._lock = threading.RLock()
        self._number = 0
        self._heard = self._ended = False
        #: When a part of the page may be sent again.
        self._next: dict[str, float] = {}
        self._looked, self._wait = False, _AGAIN_SECONDS
        self._memory = ""
        #: As HTML, by their titles: the sections that were added, as a page has them.
        self._sections = {section.title: "" for section in figures.sections}
        self._widget: Any = None

    @property
    def shown(self) -> bool:
        return self._widget is not None

    @property
    def _looks_at_time(self) -> bool:
        # Whether a reader has opened that section.
        return "Timeline" not in self.settings.get("closed", ["Timeline"])

    def panel(self, text: str) -> Data:
        """Returns the widget as a display's data, with a text for pages that show no widgets."""
        files, heard = panel_files(), self._clicks.append
        self._widget = make_widget("DashboardWidget", *files, self.snapshot, heard)
        view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        return {VIEW: view, "text/plain": text}

    def end(self) -> None:
        # A page that has everything goes on showing it.
        self._ended = True
        if not self.shown:
            return
        self._send_news(final=True)
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
                "buttons": [] if self._ended else self._button_pages(),
            }

    def _greet(self) -> None:
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

    def refresh(self) -> None:
        """Handles clicks, and sends what is new; nothing before the panel is shown."""
        if not self.shown:
            return
        while self._clicks:
            self._handle(self._clicks.popleft())
        if self.figures.members is None:
            self._request_strips()
        # At most ten times a second, and less often of many ranks.
        seconds = _NEWS_SECONDS if self._heard else _UNHEARD_SECONDS
        if self._is_due("news", max(seconds, len(self.figures.tiles.tiles) / _RANKS_A_SECOND)):
            self._send_news()

    def _is_due(self, part: str, seconds: float, final: bool = False) -> bool:
        now = time.monotonic()
        if not final and now < self._next.get(part, 0.0):
            return False
        self._next[part] = now + seconds
        return True

    def _send_news(self, final: bool = False) -> None:
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
            if timings.changed and self._is_due("timings", _TIMINGS_SECONDS, final):
                timings.changed = False
                message["timings"] = timings_page(timings)
            if self.with_logs and self._heard:
                pieces = self.logs.read(PIECE_NBYTES if final else BEHIND_NBYTES)
                if pieces:
                    message["logs"] = [
                        {"rank": p.rank, "spans": p.err_spans, "skipped": p.skipped} for p in pieces
                    ]
                    buffers += [piece.text for piece in pieces]
            self._add_time(message, final)
            self._add_sections(message, final)
            if message:
                self._send({**message, "elapsed": self.figures.elapsed}, buffers)

    @property
    def _has_strips(self) -> bool:
        return bool(self.figures.strips) and self.figures.noun == "rank"

    def _add_time(self, message: Data, final: bool) -> None:
        if not final and not self._looks_at_time:
            return
        strips = self.figures.strips
        changed = self._has_strips and (final or strips.changed)
        if changed and self._is_due("strips", _STRIPS_SECONDS, final):
            message["strips"] = strips.everything() if final else strips.news()
        if self._is_due("memory", _MEMORY_SECONDS, final):
            memory = memory_page(self.figures)
            if memory != self._memory:
                self._memory = message["memory"] = memory

    def _add_sections(self, message: Data, final: bool) -> None:
        if not self._sections or not self._is_due("sections", _MEMORY_SECONDS, final):
            return
        made = self._section_pages()
        changed = {title: html for title, html in made.items() if html != self._sections[title]}
        if changed:
            message["sections"] = changed
            self._sections = made

    def _section_pages(self) -> dict[str, str]:
        return {section.title: section_html(section) for section in self.figures.sections}

    def _button_pages(self) -> list[Data]:
        buttons = (button for button, _ in self._buttons.values())
        return [{"text": button.text, "title": button.title} for button in buttons]

    def _send(self, message: Data, buffers: list[bytes]) -> None:
        self._number += 1
        self._widget.send({**message, "seq": self._number}, buffers)

    def _handle(self, click: Data) -> None:
        kind = click.get("kind")
        if kind == "ready":
            self._greet()
        elif kind == "where" and self.ask is not None:
            for name in (requests.STATUS, requests.STACK):
                self.ask(name, {}, partial(self._say_where, name), self.figures.ranks)
        elif kind == "press" and click.get("what") in self._buttons:
            _, press = self._buttons[click["what"]]
            try:
                line = press()
            except AllranksError as error:  # which is not the cell's
                line = str(error)
            self.say(noted=line)
        elif kind in ("add", "stop") and self.act is not None:
            self.say(answer=self.act(kind, click.get("what")))
        elif kind == "settings" and isinstance(click.get("settings"), dict):
            # Kept for the picture, and for other pages.
            self.settings = click["settings"]
        elif kind == "interrupt" and not self.watched:
            # From pages that cannot ask the server to interrupt the kernel.
            signal.raise_signal(signal.SIGINT)

    def _say_where(self, name: str, answer: Answer) -> None:
        content = answer.content
        if "doing" in content:
            doing = Activity.read(content["doing"])
            content = {"line": content["line"], "activity": "" if doing == RUNNING else str(doing)}
        self.say(where={"rank": answer.rank, "what": name, **content})

    def _request_strips(self) -> None:
        # Asks the ranks to report their time while the section is open.
        looks = self._looks_at_time
        if self.ask is None or not (looks or self._looked):
            return  # as nearly always: this is called with every message
        strips = self.figures.strips
        ranks = [tile.rank for tile in self.figures.tiles.tiles.values() if not tile.gone]
        if looks != self._looked:
            self._looked, self._wait = looks, _AGAIN_SECONDS
            self._is_due("reports", self._wait, final=True)
        elif self._is_due("reports", 2 * self._wait):
            self._wait *= 2
            since = self.figures.elapsed - _AGAIN_SECONDS
            ranks = [rank for rank in ranks if strips.seconds(rank) < since]
        else:
            return
        if ranks:
            bins = strips.bins if looks else 0
            self.ask(requests.STRIPS, {"bins": bins}, lambda _: None, ranks)

    def add_buttons(self, buttons: Buttons, show: Callable[[Data], object]) -> None:
        """Adds buttons of features; ``show`` shows a display below the panel."""

        def show_below(display: Data | None, line: str) -> None:
            if display is not None:
                show(display)
            self.say(noted=line)

        for button, press in buttons.items():
            self._buttons[button.text] = button, partial(press, show_below)

    def leave(self, view: NotebookView, picture: Callable[[PlotStyle], dict[str, str]]) -> None:
        """Ends the panel, and puts what stays in its place; ``picture`` is without scripts."""
        self.end()
        view.show_panel(self.saved(picture(self.style)))

    @property
    def ended(self) -> bool:
        """Whether there is what stays of a panel."""
        return self._ended

    @property
    def style(self) -> PlotStyle:
        return PlotStyle.of(self.settings)


#: A cell with hidden output that runs for longer than this has a panel, to search the output.
_MUCH_TEXT_SECONDS = 1.0


class Dashboard(NotebookView):
    """Shows a cell's text, and above it a live panel that stays when the cell has ended.

    See ``cell_view`` for the arguments.
    """

    def __init__(
        self,
        mode: str,
        hellos: Sequence[Hello],
        log_dir: str,
        fold: bool,
        ask: Ask | None,
        buttons: Buttons,
    ) -> None:
        super().__init__([hello.rank for hello in hellos], log_dir, fold)
        self.figures = CellModel(hellos)
        self._logs = Logs(hellos)
        self._live = LivePanel(self.figures, self._logs, mode)
        self._live.add_buttons(buttons, self.show_below_panel)
        # No page of another notebook has a button that asks its ranks.
        self._live.ask, self._live.watched = ask, ask is None
        self._full = self.figures.memory.asked = mode == "full"
        self._with_imports = self._much = False

    def output(self, batch: Output) -> None:
        self._logs.take(batch)
        if batch.hidden_nbytes:
            self._much = self._live.with_logs = True
        super().output(batch)

    def telemetry(self, record: Telemetry, payloads: list[bytes]) -> None:
        self.figures.take(record, payloads)

    def left(self, rank: int, status: str) -> None:
        self.figures.left(rank, status)
        super().left(rank, status)

    def refresh(self) -> None:
        much = self._much and self.figures.elapsed >= _MUCH_TEXT_SECONDS
        if not self._live.shown and (self._full or much or self.figures.worth_showing()):
            self.show_panel(self._live.panel(summary(self.figures)))
        if not self._live.shown:
            self._show_imports()
        super().refresh()
        self._live.refresh()

    def finish(self) -> None:
        self.figures.end()
        # A panel for text comes only to a cell that takes its time; what stays is the same for all.
        if self._live.shown or self._full or self._much or self.figures.worth_showing():
            self._live.leave(self, partial(bundle, self.figures))
        elif self._with_imports:
            self.show_panel(NOTHING)
        super().finish()
        self._live.close()

    def name_cause(self, text: str) -> None:
        """Shows why the cell was slow, or wrong, first in Timeline in the panel that stays."""
        self.figures.timings.cause = text
        if self._live.ended:
            self.show_panel(self._live.saved(bundle(self.figures, self._live.style)))

    def _show_imports(self) -> None:
        line = self.figures.imports.line()
        if line is not None:
            self._with_imports = True
            self.show_panel(bar_data(*line, ""))
        elif self._with_imports:
            self.show_panel(NOTHING)


class TerminalDashboard(TerminalView):
    """Prints the ranks' output, then their last values and timings, if any.

    The mode ``full`` prints the tables in any case. ``ago`` is as in `cell_view`.
    """

    def __init__(
        self, mode: str, hellos: Sequence[Hello], log_dir: str, fold: bool, ago: float = 0.0
    ) -> None:
        super().__init__([hello.rank for hello in hellos], log_dir, fold)
        self._full = mode == "full"
        self._hellos, self._began = hellos, time.monotonic() - ago
        self._left: dict[int, str] = {}
        self.figures: CellModel | None = None
        """What the ranks have reported; None without a record, as in most cells."""
        if self._full or SECTIONS:
            self.make_figures()
        self._imports_line: ProgressLine | None = None

    def make_figures(self) -> CellModel:
        """Returns ``figures``, also where the ranks have reported nothing."""
        if self.figures is None:
            self.figures = CellModel(self._hellos)
            self.figures.started = self._began
            for rank, status in self._left.items():
                self.figures.left(rank, status)
        return self.figures

    def telemetry(self, record: Telemetry, payloads: list[bytes]) -> None:
        self.make_figures().take(record, payloads)

    def left(self, rank: int, status: str) -> None:
        self._left[rank] = status
        if self.figures is not None:
            self.figures.left(rank, status)

    def refresh(self) -> None:
        if self._imports_line is not None:
            self._imports_line.end()
        super().refresh()
        imports = self.figures.imports if self.figures is not None else None
        if imports is not None and imports.ranks and (line := imports.line()) is not None:
            self._imports_line = self._imports_line or ProgressLine(self._began)
            self._imports_line.show(*line, "")

    def finish(self) -> None:
        if self._imports_line is not None:
            self._imports_line.end()
        super().finish()
        if self.figures is None:
            return
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
    buttons: Callable[[], Buttons] = dict,
) -> Dashboard | NotebookView | TerminalDashboard | TerminalView:
    """Returns the view of a cell that fits this front end.

    Args:
        mode: ``plain`` for labelled text; ``auto`` for a panel when it has something to show;
            ``full`` for a panel with everything, from the start.
        hellos: the ranks that run the cell.
        ask: makes a request of ranks; None if they are another notebook's.
        fold: whether identical output of several ranks is shown once.
        ago: how many seconds ago the cell began.
        buttons: returns those that features add to the panel.
    """
    ranks = [hello.rank for hello in hellos]
    log_dir = os.path.dirname(hellos[0].log) if hellos else ""
    if mode == "plain":
        return text_view(ranks, log_dir, fold)
    if front_end() != NOTEBOOK:
        return TerminalDashboard(mode, hellos, log_dir, fold, ago)
    view = Dashboard(mode, hellos, log_dir, fold, ask, buttons())
    view.figures.started -= ago
    return view
