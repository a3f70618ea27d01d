"""Rich displays of several ranks in one cell: labelled, and the same ones once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allranks.records.ranks import label
from allranks.widgets.shown import Data, Shown


@dataclass
class Picture:
    """What some ranks showed as their ``turn``-th display, and the line above it."""

    turn: int
    ranks: list[int]
    data: Data
    title: Shown
    body: Shown
    noun: str = "rank"

    def show(self, data: Data, metadata: Data) -> None:
        """Shows the picture under the ranks whose it is."""
        self.data = data
        self.title.show({"text/plain": f"{label(self.ranks, self.noun)}:"})
        self.body.show(data, metadata)


class Gallery:
    """Pictures of several ranks with no text between them.

    Args:
        fold: whether the same display of several ranks is shown once.
        slots: the displays of this cell, in the order in which they were made.
        noun: what ranks are called.
    """

    def __init__(self, fold: bool, slots: list[Shown], noun: str = "rank") -> None:
        self.fold = fold
        self.noun = noun
        self._slots = slots
        self._pictures: list[Picture] = []
        self._turns: dict[int, int] = {}
        self._named: dict[tuple[int, str], Picture] = {}

    def has(self, rank: int) -> bool:
        """Whether a rank has a picture here."""
        return rank in self._turns

    def add(self, rank: int, data: Data, metadata: Data, name: str) -> None:
        """Shows a display of a rank."""
        turn = self._turns[rank] = self._turns.get(rank, 0) + 1
        picture = self._alike(rank, turn, data) if self.fold else None
        if picture is None:
            title, body = Shown(self._slots), Shown(self._slots)
            picture = Picture(turn, [], data, title, body, self.noun)
            self._pictures.append(picture)
        picture.ranks.append(rank)
        picture.show(data, metadata)
        if name:
            self._named[rank, name] = picture

    def update(self, rank: int, data: Data, metadata: Data, name: str) -> bool:
        """Changes a display that a rank has shown here; returns whether it has."""
        picture = self._named.get((rank, name))
        if picture is not None:
            picture.show(data, metadata)
        return picture is not None

    def in_order(self) -> list[Shown]:
        """Returns the displays as they are read best: by turn, then by rank."""
        self._pictures.sort(key=lambda picture: (picture.turn, min(picture.ranks)))
        return [shown for picture in self._pictures for shown in (picture.title, picture.body)]

    def _alike(self, rank: int, turn: int, data: Data) -> Picture | None:
        for picture in self._pictures:
            if picture.turn == turn and picture.data == data and rank not in picture.ranks:
                return picture
        return None


def is_rich(data: Mapping[str, Any]) -> bool:
    """Whether a mime bundle has something richer than text."""
    return not set(data) <= {"text/plain"}
