"""The cell that another notebook has left on the ranks: still running, or ended and not shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allranks.records.ranks import label


@dataclass(frozen=True)
class Left:
    """What the ranks that another notebook has started had been doing.

    ``cell`` is the number of their last cell, ``name`` what it is called in reports, ``ranks``
    those that it was sent to and ``running`` those that have not ended it; ``unseen`` says whether
    nobody may have seen its end, ``seconds`` how long it took so far. ``epoch`` and ``dirty`` are
    as the ranks have them. ``members`` has the cells of an ensemble's members, by rank.
    """

    cell: int
    name: str
    ranks: tuple[int, ...]
    running: tuple[int, ...]
    unseen: bool
    seconds: float
    epoch: int
    dirty: bool
    members: Mapping[int, int]

    @classmethod
    def of(cls, told: Mapping[int, Mapping[str, Any]]) -> Left:
        """Returns what ranks answer when they are attached to, each for itself."""
        cell = max(each["cell"] for each in told.values())
        last = {rank: each for rank, each in told.items() if each["cell"] == cell and cell}
        running = tuple(rank for rank, each in last.items() if each["busy"])
        names = [each["label"] for each in last.values()]
        members = {rank: each["cell"] for rank, each in told.items() if each["member"]}
        return cls(
            cell=cell,
            name=names[0] if names else "",
            ranks=tuple(sorted(last)),
            running=tuple(sorted(running)),
            unseen=not members and any(each["busy"] or each["unseen"] for each in last.values()),
            seconds=max((each["seconds"] for each in last.values()), default=0.0),
            epoch=max(each["epoch"] for each in told.values()),
            dirty=any(each["dirty"] and not each["busy"] for each in told.values()),
            members=members,
        )

    @property
    def text(self) -> str:
        """What became of the cell, in a line."""
        name = self.name.removeprefix("cell ")
        if self.running:
            are = "are" if len(self.running) > 1 else "is"
            return f"{label(self.running)} {are} still running {name}; its output so far:"
        return f"{name} finished while no notebook was attached:"
