"""Displays of several ranks in one cell: labelled, the same ones once, each as last updated."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from allranks.records.ranks import label
from allranks.widgets.fold import Line, Row
from allranks.widgets.mirrors import VIEW, stands_below
from allranks.widgets.shown import Data, Shown
from allranks.widgets.text import render

#: An update that would unfold a display waits so long for the other ranks to make it, too.
_HOLD_SECONDS = 0.25


@dataclass
class _Display:
    """What one rank displays."""

    rank: int
    name: str
    data: Data
    metadata: Data


@dataclass
class _Turn:
    """What ranks show as their first display, or second, and so on, and where it is shown."""

    shown: list[_Pair] = field(default_factory=list)
    #: When the first change was made that is not shown yet.
    changed_at: float | None = None


class _Pair:
    """Two outputs of the notebook: a line that says whose display it is, and the display."""

    def __init__(self, slots: list[Shown]) -> None:
        self.title, self.body = Shown(slots), Shown(slots)
        self.ranks: tuple[int, ...] = ()

    def show(self, group: list[_Display], noun: str) -> int:
        """Shows what these ranks display; returns the bytes sent."""
        self.ranks = tuple(display.rank for display in group)
        data, metadata = group[0].data, group[0].metadata
        if len(group) > 1 and VIEW in data:
            # Ranks have no widget in common but a bar, which has words of its own.
            return self.title.blank() + self.body.show(data, metadata)
        if is_rich(data):
            title = f"{label(self.ranks, noun)}:"
            if VIEW in data:
                stands_below(
                    data[VIEW]["model_id"],
                    lambda text: self.title.show({"text/plain": f"{title}\n· {text}"}),
                )
            return self.title.show({"text/plain": title}) + self.body.show(data, metadata)
        lines = str(data.get("text/plain", "")).split("\n")
        text = render([Row(self.ranks, Line("out", line)) for line in lines], noun)
        return self.title.show({"text/plain": text}) + self.body.blank()

    def blank(self) -> int:
        """Shows nothing any more; returns the bytes sent."""
        self.ranks = ()
        return self.title.blank() + self.body.blank()


class Gallery:
    """Displays of several ranks with no text between them.

    Args:
        fold: whether the same display of several ranks is shown once.
        slots: the outputs of this cell, in the order in which they were made.
        noun: what ranks are called.
    """

    def __init__(self, fold: bool, slots: list[Shown], noun: str = "rank") -> None:
        self.fold = fold
        self.noun = noun
        self._slots = slots
        self._of: dict[int, list[_Display]] = {}
        self._turns: list[_Turn] = []
        #: Nothing stands in them now: an output cannot be taken away.
        self._free: list[_Pair] = []

    @property
    def changed(self) -> bool:
        """Whether something is not shown as it is now."""
        return any(turn.changed_at is not None for turn in self._turns)

    def has(self, rank: int) -> bool:
        """Whether a rank has a display here."""
        return bool(self._of.get(rank))

    def add(self, rank: int, data: Data, metadata: Data, name: str) -> None:
        """Takes in a display of a rank."""
        displays = self._of.setdefault(rank, [])
        displays.append(_Display(rank, name, data, metadata))
        if len(displays) > len(self._turns):
            self._turns.append(_Turn())
        self._change(len(displays) - 1)

    def update(self, rank: int, data: Data, metadata: Data, name: str) -> bool:
        """Changes what a rank has displayed here under a name; returns whether it has."""
        found = False
        for at, display in enumerate(self._of.get(rank, ())):
            if name and display.name == name:
                display.data, display.metadata, found = data, metadata, True
                self._change(at)
        return found

    def clear(self, rank: int) -> None:
        """Forgets what a rank has displayed here."""
        for at in range(len(self._of.pop(rank, ()))):
            self._change(at)

    def _change(self, at: int) -> None:
        turn = self._turns[at]
        if turn.changed_at is None:
            turn.changed_at = time.monotonic()

    def show(self, now: bool) -> int:
        """Shows what has changed; returns the bytes sent.

        Args:
            now: also what may be the same for all ranks in a moment.
        """
        nbytes = 0
        for at, turn in enumerate(self._turns):
            if turn.changed_at is None:
                continue
            groups = self._groups(at)
            unfolds = turn.shown and len(groups) > len(turn.shown)
            if unfolds and not now and time.monotonic() - turn.changed_at < _HOLD_SECONDS:
                continue
            nbytes += self._show_turn(turn, groups)
        return nbytes

    def _groups(self, at: int) -> list[list[_Display]]:
        """Returns the displays of one turn, those of the same content together."""
        groups: list[list[_Display]] = []
        for rank in sorted(self._of):
            for display in self._of[rank][at : at + 1]:
                alike = (
                    group
                    for group in groups
                    if self.fold
                    and (group[0].data, group[0].metadata) == (display.data, display.metadata)
                )
                group = next(alike, None)
                if group is None:
                    groups.append([display])
                else:
                    display.data = group[0].data  # and so it is in memory once
                    group.append(display)
        return groups

    def _show_turn(self, turn: _Turn, groups: list[list[_Display]]) -> int:
        turn.changed_at = None
        left, nbytes = list(turn.shown), 0
        turn.shown = []
        for group in groups:
            # The same ranks stay where they are, as far as they can.
            ranks = {display.rank for display in group}
            pair = max(left, key=lambda pair: len(ranks & set(pair.ranks)), default=None)
            if pair is None:
                pair = self._free.pop() if self._free else _Pair(self._slots)
            else:
                left.remove(pair)
            turn.shown.append(pair)
            nbytes += pair.show(group, self.noun)
        for pair in left:
            nbytes += pair.blank()
            self._free.append(pair)
        return nbytes

    def in_order(self) -> list[Shown]:
        """Returns the outputs as they are read best: by turn, then by rank; empty ones last."""
        pairs = [
            *(p for turn in self._turns for p in sorted(turn.shown, key=lambda pair: pair.ranks)),
            *self._free,
        ]
        return [shown for pair in pairs for shown in (pair.title, pair.body) if shown]


def is_rich(data: Mapping[str, Any]) -> bool:
    """Whether a mime bundle has something richer than text."""
    return not set(data) <= {"text/plain"}
