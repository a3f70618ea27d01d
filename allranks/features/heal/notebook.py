"""``%distributed heal`` and ``keep``: when dead ranks are replaced, and what comes back."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from allranks.cluster import cluster
from allranks.cluster.cell_run import CellRun, HiddenView
from allranks.cluster.cells import Cells
from allranks.cluster.failures import refused_by_all
from allranks.cluster.features import ClusterContext, NotebookFeature
from allranks.cluster.options import LineCommand
from allranks.cluster.state import ClusterState
from allranks.cluster.variables import OnRank
from allranks.errors import AllranksError, CellFailed, UsageError
from allranks.features.heal import recovery_driver
from allranks.features.heal.recovered import listed

_ALIVE = "All ranks are alive."
_FIXED = (
    "These ranks cannot be replaced: when one dies, all others are killed, and the next cell "
    "starts new ones."
)
_HEALING = {
    "on": "A rank that dies is replaced automatically; the others keep their variables.",
    "ask": "A rank that dies is replaced when you type: %distributed heal",
    "off": "When a rank dies, all others are killed, and the next cell starts new ones.",
}
_COMMANDS: Mapping[str, Callable[..., Any]] = {
    "replace_ranks": recovery_driver.replace,
    "restore_ranks": recovery_driver.restore,
    "continue_recovery": recovery_driver.go_on,
}
_KEEP = OnRank("allranks.collectives.ops.keeping", "keep")
_VARIABLES = {"nargs": "*", "metavar": "NAMES", "help": "the variables' names"}
_EVERY = {"type": float, "default": 0.0, "metavar": "SECONDS", "help": "at most once in this time"}


class NotebookHeal(NotebookFeature):
    """Replaces dead ranks, and has the ranks keep variables after cells."""

    in_cells = False  # until variables are kept
    replaces_ranks = "%distributed heal"
    commands = frozenset(_COMMANDS)
    line_commands = (
        LineCommand(
            "keep",
            "keeps variables after each cell, for ranks that replace dead ones, until: keep off",
            arguments={"variables": _VARIABLES, "--every": _EVERY},
        ),
        LineCommand(
            "heal",
            "replaces dead ranks now; or sets when: always (on), on request (ask), never (off)",
            "on|ask|off",
            "when, from now on; without it, dead ranks are replaced now",
        ),
    )

    def __init__(self) -> None:
        #: What the user has chosen for these and later ranks: when dead ones are replaced, and what
        #: is kept after a cell.
        self._when = ""
        self._after: AfterCells | None = None
        #: Those that have had this choice: a program may have changed it since.
        self._set = weakref.WeakSet[ClusterState]()

    def started(self, cluster: ClusterContext) -> None:
        if self._when and cluster.roster not in self._set:
            cluster.roster.replacing = self._when
        self._set.add(cluster.roster)

    def ranks_missing(self, run: CellRun, cells: Cells) -> None:
        died = cells.connection.words.deaths_text()
        said = recovery_driver.replace_after(cells.connection, run)
        if isinstance(run.view, HiddenView) and not run.view.is_read:
            # Its own end may be read later, or never: the next cell shows it.
            cells.news += [died, said]

    def cell_left(self, run: CellRun, cells: Cells) -> None:
        if self._after is not None:
            self._after.keep_after(run, cells)

    def command(self, name: str, *arguments: Any) -> Any:
        if name in _COMMANDS:
            return _COMMANDS[name](*arguments)
        (asked,) = arguments
        if name == "keep":
            return self._keep(asked["variables"], asked["every"])
        return self._heal_when(" ".join(asked)) if asked else _heal()

    def _heal_when(self, when: str) -> str:
        if when not in _HEALING:
            raise UsageError(
                f"expected {', '.join(_HEALING)}, found {when!r}. Type for example: "
                "%distributed heal on"
            )
        self._when = when
        self._set.clear()
        session: Any = cluster.session
        running = session.running
        if running is not None:
            running.heal_when(when)
            self._set.add(running.roster)
        fixed = when != "off" and running is not None and not running.roster.can_replace
        return _FIXED if fixed else _HEALING[when]

    def _keep(self, words: Sequence[str], every: float) -> str:
        names = [name for word in words for name in word.split(",") if name]
        if not names:
            raise UsageError(
                "expected the names of variables, found none. "
                "Type for example: %distributed keep x, y"
            )
        if names == ["off"]:
            self._after, self.in_cells = None, False
            return "No variables are kept after cells from now on; those kept before remain."
        unfit = [name for name in names if not name.isidentifier()]
        if unfit:
            raise UsageError(
                f"expected the names of variables, found {unfit[0]:.60}. "
                "Type for example: %distributed keep model, step"
            )
        self._after, self.in_cells = AfterCells(names, every), True
        often = f", at most once in {every:g} s," if every else ""
        return f"{listed(names)} kept after each cell{often} until: %distributed keep off"


def _heal() -> str:
    session: Any = cluster.session
    ranks = session.running
    if ranks is None and (line := session.where()):
        raise UsageError(f"expected ranks of this notebook, found {line} Type it there")
    if ranks is None:
        raise UsageError("no ranks are running. Type: %distributed start")
    said: list[str] = []

    def tell(text: str) -> None:
        said.append(text)
        print(text)

    if not ranks.cells.is_up(tell):
        return str(ranks.lost_because.splitlines()[0])
    if ranks.roster.dead:
        print(ranks.cells.connection.words.deaths_text())
        return str(ranks.heal(print))
    return "" if said else _ALIVE


class AfterCells:
    """Which variables are kept after a cell; ``every`` is the least interval in seconds."""

    def __init__(self, names: Sequence[str], every: float = 0.0) -> None:
        if not every >= 0:
            raise UsageError(
                f"--every expected 0 seconds or more, found {every:g}. Type for example: --every 60"
            )
        self.names, self.every = tuple(names), every
        self._last = float("-inf")

    def keep_after(self, run: CellRun, cells: Cells) -> None:
        """Has the ranks keep them if the cell has ended well, and it is time."""
        ranks, view = cells.connection, run.view
        if isinstance(view, HiddenView) or ranks.roster.phase != "running":
            return
        if not run.ended_well or not self._is_due():
            return
        call = cloudpickle.dumps((_KEEP, self.names, {}))
        try:
            hidden = HiddenView(ranks.late.append, view.notice, is_read=True)
            cells.wait(cells.begin("", call=call, name="keep", view=hidden))
        except AllranksError as error:
            # Its line is ours, not one of the user's.
            reports = error.reports if isinstance(error, CellFailed) else ()
            said = next((one.message or one.etype for one in reports if not one.waiting), error)
            if refused_by_all(reports, ranks.size):
                # They have compared the reasons, so no message is on its way. A new epoch would end
                # the communicators of the user's cells.
                ranks.roster.epoch.dirty = False
            view.notice(f"{listed(self.names)} not kept: {said}")

    def _is_due(self) -> bool:
        """Whether it is time; if so, the interval starts again."""
        now = time.monotonic()
        if now - self._last < self.every:
            return False
        self._last = now
        return True


FEATURE = NotebookHeal
