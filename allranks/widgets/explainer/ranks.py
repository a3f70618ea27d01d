"""Whose ranks run what is explained: a cluster that was given, or the notebook's own."""

from __future__ import annotations

from allranks.errors import UsageError
from allranks.widgets import offered
from allranks.widgets.offered import Ranks


def wanted(cluster: Ranks | None, ranks: int | None) -> Ranks:
    """Returns the ranks to run on; the notebook's are started now, as a cell would start them.

    Raises:
        UsageError: there is neither a cluster nor a session that could start one.
    """
    if cluster is not None:
        return cluster
    if offered.session is None:
        raise UsageError(
            "an explainer needs ranks to run on, and this notebook has none. Type: "
            "%load_ext allranks   (or pass cluster=allranks.Cluster(4).start())"
        )
    return offered.session.of_size(None if offered.session.running else ranks)


def present(cluster: Ranks | None) -> Ranks:
    """Returns the ranks to run on again; nothing is started.

    Raises:
        UsageError: they are not running.
    """
    found = cluster or (offered.session.running if offered.session else None)
    if found is None:
        raise UsageError("no ranks are running. Type: %distributed start")
    return found
