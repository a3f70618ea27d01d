"""The members of an ensemble, and their groups by the values of a parameter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class MemberRow:
    """One member: its parameters, its state, and its value of the metric that counts.

    ``values`` is the parameters in one text; of ``parameters`` each is a number or a text.
    """

    number: int
    values: str
    state: str
    rank: int | None
    metric: float | None
    seconds: float | None
    error: str
    parameters: dict[str, float | int | str] = field(default_factory=dict)


class MemberTable:
    """The rows of an ensemble that runs, and what is said of it as a whole.

    ``metric`` is the name of the numbers in the rows; ``lower`` says whether lower ones are better.
    """

    def __init__(self) -> None:
        self.rows: dict[int, MemberRow] = {}
        self.metric = ""
        self.lower = False
        self.said = ""
        self._started: dict[int, float] = {}
        self._changed: set[int] = set()
        self._told: tuple[Any, ...] = ()

    def put(self, row: MemberRow) -> None:
        """Takes in a member as it is now."""
        before = self.rows.get(row.number)
        if row == before:
            return
        if row.state == "running" and (before is None or before.state != "running"):
            self._started[row.number] = time.monotonic()
        self.rows[row.number] = row
        self._changed.add(row.number)

    def counts(self) -> dict[str, int]:
        """Returns how many members are in each state that there is."""
        found: dict[str, int] = {}
        for row in self.rows.values():
            found[row.state] = found.get(row.state, 0) + 1
        return found

    def news(self) -> dict[str, Any] | None:
        """Returns what has changed since the last time; None where nothing has."""
        whole = self.metric, self.lower, self.said
        if not self._changed and whole == self._told:
            return None
        told = self._tell([self.rows[number] for number in sorted(self._changed)])
        self._changed.clear()
        self._told = whole
        return told

    def everything(self) -> dict[str, Any]:
        """Returns all rows, in the form of :meth:`news`."""
        return self._tell(list(self.rows.values()))

    def _tell(self, rows: list[MemberRow]) -> dict[str, Any]:
        now = time.monotonic()
        told = []
        for row in rows:
            one = dict(vars(row))
            if row.state == "running":
                one["seconds"] = now - self._started[row.number]
            told.append(one)
        return {"rows": told, "metric": self.metric, "lower": self.lower, "said": self.said}


_FEW_VALUES = 8
_PARTS = 4


def groups(rows: Sequence[MemberRow]) -> dict[str, list[int]]:
    """Returns the members of each value of the first parameter that differs; empty without one.

    Many different numbers are cut into parts with as many values each.
    """
    names = dict.fromkeys(name for row in rows for name in row.parameters)
    for name in names:
        found = by(rows, name)
        if len(found) > 1:
            return found
    return {}


def by(rows: Sequence[MemberRow], name: str) -> dict[str, list[int]]:
    """Returns the members of each value, or part, of a parameter, by what they are called."""
    values = list(dict.fromkeys(row.parameters[name] for row in rows if name in row.parameters))
    numbers = not any(isinstance(value, str) for value in values)
    if numbers:
        values.sort(key=float)
    count = len(values)
    if count > _FEW_VALUES:
        count = _PARTS if numbers else _FEW_VALUES
    cuts = [place * len(values) // count for place in range(count + 1)] if count else []
    found = {}
    for start, stop in pairwise(cuts):
        part = values[start:stop]
        ends = dict.fromkeys((_value_text(part[0]), _value_text(part[-1])))
        among = set(part)
        members = [row.number for row in rows if row.parameters.get(name) in among]
        found[f"{name}={' to '.join(ends)}"] = members
    return found


def _value_text(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
