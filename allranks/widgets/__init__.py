"""Runs in the notebook's kernel: shows what the ranks said, live, and leaves a still picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks.widgets.notebook import NotebookView
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
    from IPython.core.getipython import get_ipython

    if getattr(get_ipython(), "kernel", None) is not None:
        from allranks.widgets.notebook import NotebookView

        return NotebookView(ranks, log_dir, fold)
    from allranks.widgets.terminal import TerminalView

    return TerminalView(ranks, log_dir, fold)
