"""``ranks``: the notebook's cluster by a name, as in ``ranks.map(train, rates)``."""

from __future__ import annotations

from typing import Any

from allranks.ensemble.mapping import Cluster
from allranks.magics.session import Session

NAME = "ranks"


class Ranks:
    """Has what ``allranks.Cluster`` has; the ranks are started when they are first needed.

    Args:
        session: whose cluster it is.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        # IPython asks every object for _repr_html_ and the like: that starts nothing.
        if name.startswith("_"):
            raise AttributeError(name)
        if not hasattr(Cluster, name) and self._session.running is None:
            raise AttributeError(f"no ranks are running, and a cluster has no {name!r}")
        return getattr(self._session.cluster(), name)

    def stop(self) -> None:
        """Ends the ranks, where any run."""
        if self._session.running is not None:
            self._session.running.stop()

    def __dir__(self) -> list[str]:
        return [name for name in dir(Cluster) if not name.startswith("_")]

    def __repr__(self) -> str:
        running = self._session.running
        return repr(running) if running is not None else "<ranks, not started yet>"
