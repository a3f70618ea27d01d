"""Has ranks run an allreduce, and shows it."""

from __future__ import annotations

from typing import Any

from allranks.errors import UsageError
from allranks.widgets.explainer import values as arrays
from allranks.widgets.explainer.explainer import ALGORITHMS, Explainer
from allranks.widgets.explainer.ranks import present, wanted
from allranks.widgets.offered import Ranks


def ring(
    cluster: Ranks | None, algorithm: str, ranks: int | None, size: int, values: Any
) -> Explainer:
    """Returns what :func:`allranks.widgets.ring` returns, which says what the arguments are."""
    if algorithm not in ALGORITHMS:
        raise UsageError(
            f"expected one of {', '.join(ALGORITHMS)}, found {algorithm!r}. Type for example: "
            'ring(algorithm="tree")'
        )
    own = None if values is None else arrays.given(values)
    if own is None:
        arrays.made(ranks or 2, size)  # refuses before anything is started
    found = wanted(cluster, ranks if own is None else len(own))
    if own is None:
        own = arrays.made(ranks or min(max(2, found.size), arrays.MOST_RANKS), size)
    return Explainer(found.explain(algorithm, own), lambda: present(cluster))
