"""One display in a notebook's output, that is updated in place and may change places."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from allranks.widgets.reopened.missed import missed

Data = dict[str, Any]


class Shown:
    """A display, made when there is something in it.

    Args:
        slots: the displays of this cell, in the order in which they were made; it joins them.
    """

    def __init__(self, slots: list[Shown]) -> None:
        self._slots = slots
        self._id = ""
        self._content: tuple[Data, Data] | None = None

    def __bool__(self) -> bool:
        return bool(self._id)

    @property
    def content(self) -> tuple[Data, Data]:
        """What it shows now, with its metadata."""
        return self._content or ({}, {})

    def show(self, data: Data, metadata: Data | None = None) -> int:
        """Shows the data in place; returns the bytes sent, 0 where nothing has changed."""
        from IPython.display import display, update_display

        content = data, metadata or {}
        if content == self._content:
            return 0
        self._content = content
        act: Any = update_display
        if not self._id:
            self._id = f"allranks-{uuid.uuid4().hex}"
            self._slots.append(self)
            act = display
        act(data, raw=True, display_id=self._id, metadata=content[1])
        missed.take(self._id, *content)
        return sum(len(str(part)) for part in data.values())

    def blank(self) -> int:
        """Empties the display, if it was made: it cannot be taken away."""
        return self.show({}) if self else 0

    def _move(self, name: str) -> None:
        """Shows its content in the display of this id, or in a new one."""
        content, self._content, self._id = self._content, None, name
        assert content is not None
        self.show(*content)


def put_above(new: Shown, data: Data, slots: list[Shown], first: int = 0) -> None:
    """Shows something for the first time, above all other displays but the first ones.

    A page draws between two messages. So what stands there moves down from the last one on: the
    new one is never shown twice, and no other is gone for a moment.

    Args:
        new: what has not been shown yet.
        data: what it shows.
        slots: the other displays as they were made; all of them afterwards.
        first: below how many of them.
    """
    above, others = slots[:first], slots[first:]
    names = [*(shown._id for shown in others), ""]
    for at in reversed(range(len(others))):
        others[at]._move(names[at + 1])
    new._id = names[0]
    new.show(data)
    slots[:] = [*above, new, *others]


def deal(order: Sequence[Shown], slots: list[Shown]) -> None:
    """Puts displays into another order: an output cannot move, but its contents can.

    Args:
        order: the displays as they are to be read.
        slots: the same displays as they were made; in the new order afterwards.
    """
    names = [shown._id for shown in slots]
    for shown, name in zip(order, names, strict=True):
        if shown._id != name:
            shown._move(name)
    slots[:] = order
