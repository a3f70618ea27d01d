"""The members of an ensemble as a table shows them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
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


class Members:
    """The rows of an ensemble that runs, and what is said of it as a whole.

    ``metric`` is the name of the numbers in the rows; ``lower`` says whether lower ones are better.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.metric = ""
        self.lower = False
        self.said = ""
        self._started: dict[int, float] = {}
        self._changed: set[int] = set()
        self._told: tuple[Any, ...] = ()

    def put(self, row: Row) -> None:
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

    def _tell(self, rows: list[Row]) -> dict[str, Any]:
        now = time.monotonic()
        told = []
        for row in rows:
            one = dict(vars(row))
            if row.state == "running":
                one["seconds"] = now - self._started[row.number]
            told.append(one)
        return {"rows": told, "metric": self.metric, "lower": self.lower, "said": self.said}
