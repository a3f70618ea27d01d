"""Members by the values of a parameter, as the live panel groups them too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from allranks.widgets.ensemble.rows import Row

_FEW = 8
_PARTS = 4


def groups(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Returns the members of each value of the first parameter that differs; empty without one.

    Many different numbers are cut into parts with as many values each.
    """
    names = dict.fromkeys(name for row in rows for name in row.parameters)
    for name in names:
        found = by(rows, name)
        if len(found) > 1:
            return found
    return {}


def by(rows: Sequence[Row], name: str) -> dict[str, list[int]]:
    """Returns the members of each value, or part, of a parameter, by what they are called."""
    values = list(dict.fromkeys(row.parameters[name] for row in rows if name in row.parameters))
    numbers = not any(isinstance(value, str) for value in values)
    if numbers:
        values.sort(key=float)
    count = len(values)
    if count > _FEW:
        count = _PARTS if numbers else _FEW
    cuts = [place * len(values) // count for place in range(count + 1)] if count else []
    found = {}
    for start, stop in pairwise(cuts):
        part = values[start:stop]
        ends = dict.fromkeys((_said(part[0]), _said(part[-1])))
        among = set(part)
        members = [row.number for row in rows if row.parameters.get(name) in among]
        found[f"{name}={' to '.join(ends)}"] = members
    return found


def _said(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
