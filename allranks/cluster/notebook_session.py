"""The session of this notebook, for code that runs without magics: ``allranks.run`` and lessons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class NotebookRanks(Protocol):
    """The part of ``allranks.Cluster`` that a lesson uses."""

    size: int

    @property
    def busy(self) -> bool:
        """Whether a cell is running."""

    def explain(self, algorithm: str, values: Sequence[Sequence[float]]) -> Any:
        """Runs an allreduce on as many ranks as there are arrays; returns its steps."""


class NotebookSession(Protocol):
    """A notebook's session."""

    @property
    def running(self) -> NotebookRanks | None:
        """The notebook's cluster, if its ranks are up."""

    def of_size(self, n: int | None) -> NotebookRanks:
        """The notebook's cluster, started now with so many ranks if need be."""


session: NotebookSession | None = None
"""None while the extension is not loaded."""


def set_session(new: NotebookSession | None) -> None:
    """Sets the notebook's session; None removes it."""
    global session
    session = new
