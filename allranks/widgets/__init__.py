"""Runs in the notebook's kernel: shows output of the ranks live, and saves it in the notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allranks.widgets.explainer.explainer import Explainer
    from allranks.widgets.offered import Ranks


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
