"""The notebook's ranks, which the extension offers to explainers and to ``allranks.run``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from allranks.records.lessons import Explained


class Ranks(Protocol):
    """What an explainer needs of a cluster; ``allranks.Cluster`` has it."""

    size: int

    @property
    def busy(self) -> bool:
        """Whether a cell is running."""

    def explain(self, algorithm: str, values: Sequence[Sequence[float]]) -> Explained:
        """Runs an allreduce that tells its steps on as many ranks as there are arrays."""


class Session(Protocol):
    """A notebook's session."""

    @property
    def running(self) -> Ranks | None:
        """The notebook's cluster, if its ranks are up."""

    def of_size(self, n: int | None) -> Ranks:
        """The notebook's cluster, started now with so many ranks if need be."""


session: Session | None = None
"""The notebook's, while the extension is loaded."""


def offer(offered: Session | None) -> None:
    """From now on this is the notebook's session; None takes it away."""
    global session
    session = offered
