"""What features add to the views of cells. `allranks.cluster.features.register` fills the lists.

A part that raises is left out from then on, with a warning that names it: the cell goes on, and all
its output is shown.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from allranks.hooks import failure


class LineFolder:
    """Recognises lines of several ranks that are shown as one although their texts differ.

    A text is folded by the first of these with a mark in one of its lines.
    """

    marks: tuple[str, ...] = ()
    """One of these is in every such line, and in hardly any other one: all lines are searched."""

    def name_of(self, text: str) -> str:
        """Returns what is the same on all ranks in a line; "" if the line is none of those."""
        return ""

    def folded(self, texts: Sequence[str], ranks: Sequence[int]) -> str:
        """Returns one line for those of several ranks, which have the same name."""
        return texts[0]


class DisplayFolder:
    """Folds displays of several ranks of a cell in a notebook; each view makes its own."""

    def fold(self, rank: int, data: dict[str, Any]) -> dict[str, Any]:
        """Returns a rank's display, or another one in its place."""
        return data

    def refresh(self) -> None:
        """Shows what is new; called several times a second, and at the end of the cell."""


class DisplayObserver:
    """Gets all displays of this kernel, as they are shown."""

    def shown(self, name: str, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """A display with this id is shown, or has other contents from now on."""

    def refresh(self) -> None:
        """Called several times a second while a cell shows its output."""


#: Those of features. Each list holds for all views of this process.
LINE_FOLDERS: list[LineFolder] = []
DISPLAY_FOLDERS: list[Callable[[], DisplayFolder]] = []
DISPLAY_OBSERVERS: list[DisplayObserver] = []


@contextmanager
def leaving_out(parts: list[Any], part: object, method: Callable[..., object]) -> Iterator[None]:
    """Within, a method of one of these parts is called; an error of it removes the part."""
    try:
        yield
    except Exception as error:  # another distribution's code
        if part in parts:
            parts.remove(part)
        warnings.warn(str(failure(method, error)), stacklevel=4)
