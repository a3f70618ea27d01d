"""The views of a cell with a panel: in a notebook live, in a terminal as tables at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from allranks.records.telemetry import Pulse, Telemetry
from allranks.records.wire import Hello, Output
from allranks.widgets.dashboard.cell_model import CellModel
from allranks.widgets.dashboard.live import Ask, Live, Profiled, Profiler, Watching, act
from allranks.widgets.dashboard.logs import Logs
from allranks.widgets.dashboard.saved_panel import alive
from allranks.widgets.dashboard.still import bundle, summary, text
from allranks.widgets.dashboard.svg import PlotStyle
from allranks.widgets.displays import Data
from allranks.widgets.notebook import NotebookView
from allranks.widgets.progress import Imports, ProgressLine, bar_data
from allranks.widgets.terminal import TerminalView

#: A cell that writes more than is shown, for longer than this, has a panel to search it.
_MUCH_TEXT_SECONDS = 1.0
#: A display cannot be taken away, and nbconvert warns of one that has no data.
_NOTHING = {"text/html": "", "text/plain": ""}


def _ask_nobody(*_: object) -> None:
    """No page has a button for it."""


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
        self._live = Live(self.figures, self._logs, mode)
        if profiler is not None:
            self._live.profiled = Profiled(profiler, text.show_below_panel, self._live.say)
        self._watching = Watching(self.figures)
        self._live.watched = ask is None
        self._text = text
        self._ask = ask or _ask_nobody
        self._full = self.figures.memory.asked = mode == "full"
        self._shown = False
        self._imports = Imports()
        self._with_imports = False
        self._hidden = False

    def output(self, batch: Output) -> None:
        """Takes in what a rank wrote."""
        self._logs.take(batch)
        if batch.hidden_lines:
            self._hidden = self._live.with_logs = True
        self._text.output(batch)

    def telemetry(self, record: Telemetry, payloads: list[bytes]) -> None:
        """Takes in what a rank tells beside its output."""
        self.figures.take(record, payloads)
        if isinstance(record, Pulse):
            self._imports.take(record)

    def left(self, rank: int, status: str) -> None:
        """Takes in that a rank has left the cell."""
        self.figures.tiles.left(rank, status)
        self._imports.left(rank)
        self._text.left(rank, status)

    def notice(self, text: str) -> None:
        """Takes in a line about the cell as a whole."""
        self._text.notice(text)

    def make_way(self) -> None:
        """Shows all that was written: a person is asked below it."""
        self._text.make_way()

    def refresh(self) -> None:
        """Shows what is new, and does what was clicked."""
        if not self._shown and self._has_something():
            self._shown = True
            self._text.show_panel(self._live.panel(summary(self.figures)))
        if not self._shown:
            self._show_imports()
        self._text.refresh()
        if self._shown:
            while self._live.clicks:
                act(self._live.clicks.popleft(), self._live, self._ask)
            self._watching.step(self._live.looks_at_time, self._ask)
            self._live.refresh()

    def finish(self) -> None:
        """Shows everything, and replaces the live panel by one that needs no kernel."""
        self.figures.end()
        # A panel for text comes only to a cell that takes its time; what stays is the same for all.
        if self._shown or self._full or self._hidden or self.figures.worth_showing():
            self._live.end()
            picture = bundle(self.figures, PlotStyle.of(self._live.settings))
            self._text.show_panel(alive(picture, self._live))
        elif self._with_imports:
            self._text.show_panel(_NOTHING)
        self._text.finish()
        self._live.close()

    def outputs(self) -> list[tuple[Data, Data]]:
        """Returns what stands in the notebook, as display data with metadata."""
        return self._text.outputs()

    def _show_imports(self) -> None:
        """Shows what is being imported in the panel's place, as long as there is no panel."""
        line = self._imports.line()
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
        self._imports = Imports()
        self._passing = ProgressLine()
        self._with_imports = False

    def telemetry(self, record: Telemetry, payloads: list[bytes]) -> None:
        """Takes in what a rank tells beside its output."""
        self.figures.take(record, payloads)
        if isinstance(record, Pulse):
            self._imports.take(record)

    def left(self, rank: int, status: str) -> None:
        """Takes in that a rank has left the cell."""
        self.figures.tiles.left(rank, status)
        self._imports.left(rank)

    def refresh(self) -> None:
        """Prints what is new, and below it what is being imported."""
        if self._with_imports:
            self._passing.end()
        super().refresh()
        line = self._imports.line()
        self._with_imports = line is not None
        if line is not None:
            self._passing.show(*line, "")

    def finish(self) -> None:
        """Prints everything."""
        self._passing.end()
        super().finish()
        self.figures.end()
        if self._full or self.figures.worth_showing():
            print(text(self.figures), file=sys.stdout, flush=True)
