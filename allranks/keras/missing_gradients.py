"""By what the ranks notice that they lack the gradients of different variables. In every rank.

Another rank's gradient of the same shape may then belong to another variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def places(variables: Sequence[Any], every: Sequence[Any]) -> list[int] | None:
    """The places of some variables among all of an optimizer; None where these are all."""
    if len(variables) >= len(every):
        return None
    known = {id(variable): place for place, variable in enumerate(every)}
    found = [known[id(variable)] for variable in variables if id(variable) in known]
    return found if len(found) == len(variables) else None  # Keras rejects an unknown one


def labels(shared: Sequence[int], count: int, places: Sequence[int] | None) -> tuple[str, ...]:
    """The labels, which the ranks compare, of the gradients at ``shared`` of ``count``.

    ``places``: those of the variables, if some have been left out. Without a gap there are none.
    """
    if places is not None:
        shared = [places[index] for index in shared]
    elif len(shared) == count:
        return ()
    return tuple(f"gradient {place}" for place in shared)
