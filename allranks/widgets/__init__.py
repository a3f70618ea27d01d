"""Runs in the notebook's kernel: shows what the ranks said, live, and leaves a still picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allranks.widgets.front_end import NOTEBOOK, front_end

if TYPE_CHECKING:
    from allranks.records.wire import Hello
    from allranks.widgets.dashboard.live import Ask, Profiler
    from allranks.widgets.dashboard.view import Dashboard, TerminalDashboard
    from allranks.widgets.explainer.explainer import Explainer
    from allranks.widgets.notebook import NotebookView
    from allranks.widgets.offered import Ranks
    from allranks.widgets.terminal import TerminalView


def text_view(
    ranks: Sequence[int], log_dir: str = "", fold: bool = True
) -> NotebookView | TerminalView:
    """Returns the labelled text view that fits this front end.

    Args:
        ranks: the ranks whose output is to come.
        log_dir: where their logs are, for the line that says what is not shown.
        fold: whether identical output of several ranks is shown once.
    """
    if front_end() == NOTEBOOK:
        from allranks.widgets.notebook import NotebookView

        return NotebookView(ranks, log_dir, fold)
    from allranks.widgets.terminal import TerminalView

    return TerminalView(ranks, log_dir, fold)


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
    if front_end() == NOTEBOOK:
        from allranks.widgets.dashboard.view import Dashboard
        from allranks.widgets.notebook import NotebookView

        view: Dashboard | TerminalDashboard
        view = Dashboard(mode, hellos, NotebookView(ranks, log_dir, fold), ask, profiler)
    else:
        from allranks.widgets.dashboard.view import TerminalDashboard

        view = TerminalDashboard(mode, hellos, log_dir, fold)
    view.figures.started -= ago
    return view


def ring(
    cluster: Ranks | None = None,
    algorithm: str = "ring",
    ranks: int | None = None,
    size: int = 8,
    values: Any = None,
) -> Explainer:
    """Runs an allreduce on a cluster's ranks and returns it, to be played round by round.

    Args:
        cluster: an ``allranks.Cluster``; by default the notebook's own, which is started now if
            it is not running.
        algorithm: ``ring``, ``recursive doubling`` or ``tree``.
        ranks: how many take part, from rank 0 on; by default all, and at most 16.
        size: how many values each rank has, at most 32.
        values: in place of ``ranks`` and ``size`` the arrays to sum up, one a rank.

    Raises:
        UsageError: there is no such algorithm, or there are not so many ranks, or none at all.
    """
    from allranks.widgets.explainer import explainer

    return explainer.ring(cluster, algorithm, ranks, size, values)
