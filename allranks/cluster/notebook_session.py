"""The session of this notebook, for code that runs without magics: ``allranks.run`` and lessons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class NotebookRanks(Protocol):
    """The part of ``allranks.Cluster`` that a lesson uses."""

    size: int

    @property
    def busy(self) -> bool: ...

    def explain(self, algorithm: str, values: Sequence[Sequence[float]]) -> Any:
        """Runs an allreduce on as many ranks as there are arrays; returns its steps."""


class NotebookSession(Protocol):
    """The interface of a notebook's session."""

    @property
    def running(self) -> NotebookRanks | None: ...

    def of_size(self, n: int | None) -> NotebookRanks:
        """Returns the notebook's cluster, started now with this number of ranks if necessary."""


session: NotebookSession | None = None
"""None while the extension is not loaded."""


def set_session(new: NotebookSession | None) -> None:
    global session
    session = new
