"""Whose ranks run what is explained: a cluster that was given, or the notebook's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from allranks.errors import UsageError
from allranks.records.explained import Explained


class Ranks(Protocol):
    """What an explainer needs of a cluster; ``allranks.Cluster`` has it."""

    size: int

    @property
    def busy(self) -> bool:
        """Whether a cell is running."""

    def explain(self, algorithm: str, values: Sequence[Sequence[float]]) -> Explained:
        """Runs an allreduce that tells its steps on as many ranks as there are arrays."""


class Session(Protocol):
    """What an explainer needs of a notebook's session."""

    @property
    def running(self) -> Ranks | None:
        """The notebook's cluster, if its ranks are up."""

    def of_size(self, n: int | None) -> Ranks:
        """The notebook's cluster, started now with so many ranks if need be."""


_session: Session | None = None


def offer(session: Session | None) -> None:
    """The notebook's session, which the extension offers when it is loaded; None takes it away."""
    global _session
    _session = session


def wanted(cluster: Ranks | None, ranks: int | None) -> Ranks:
    """Returns the ranks to run on; the notebook's are started now, as a cell would start them.

    Raises:
        UsageError: there is neither a cluster nor a session that could start one.
    """
    if cluster is not None:
        return cluster
    if _session is None:
        raise UsageError(
            "an explainer needs ranks to run on, and this notebook has none. Type: "
            "%load_ext allranks   (or pass cluster=allranks.Cluster(4).start())"
        )
    return _session.of_size(None if _session.running else ranks)


def present(cluster: Ranks | None) -> Ranks:
    """Returns the ranks to run on again; nothing is started.

    Raises:
        UsageError: they are not running.
    """
    found = cluster or (_session.running if _session else None)
    if found is None:
        raise UsageError("no ranks are running. Type: %distributed start")
    return found
