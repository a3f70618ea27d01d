"""The view of a terminal: lines as they come, and tables when the cell has ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from allranks.records.telemetry import Pulse, Telemetry
from allranks.records.wire import Hello
from allranks.widgets.bar import Passing
from allranks.widgets.dashboard.figures import Figures
from allranks.widgets.dashboard.tables import text
from allranks.widgets.imports import Imports
from allranks.widgets.terminal import TerminalView


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
        self.figures = Figures(hellos)
        self._imports = Imports()
        self._passing = Passing()
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
