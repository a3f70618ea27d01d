"""The cells of a notebook that have ended: what they showed, and in files what they logged."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.errors import UsageError
from allranks.widgets.dashboard.kept import Kept, kept
from allranks.widgets.shown import Data

#: What so many cells have shown can be drawn again.
_CELLS = 30
#: The files of one cluster, beside its logs; the oldest go first.
_FILES, _FILES_NBYTES = 100, 64 << 20
_NAME = "cell-{}.json.gz"


class Past:
    """The cells of a notebook that have ended."""

    def __init__(self) -> None:
        self._shown: dict[int, list[tuple[Data, Data]]] = {}
        self._files: dict[int, Path] = {}
        self._last: int | None = None

    def keep(self, number: int, view: Any, folder: str) -> None:
        """Takes in that a cell has ended.

        Args:
            number: the notebook's number of it.
            view: what has shown it; one of a notebook has ``outputs``, one with curves ``figures``.
            folder: where the ranks' logs are.
        """
        self._last = number
        self._shown.pop(number, None)
        if (outputs := getattr(view, "outputs", None)) is not None:
            self._shown[number] = outputs()
        for old in [*self._shown][:-_CELLS]:
            del self._shown[old]
        figures = getattr(view, "figures", None)
        self._files.pop(number, None)
        if figures is None or not (figures.worth_showing() or figures.members):
            return
        path = Path(folder) / _NAME.format(number)
        with suppress(OSError):  # a full disk, or a folder that was removed: the cell is done
            kept(number, figures).write(path)
            self._files[number] = path
            _sweep(path.parent)

    def shown(self, number: int | None) -> list[tuple[Data, Data]]:
        """Returns what a cell has left in the notebook, as display data with metadata.

        Args:
            number: the notebook's number of it; None for the last one.

        Raises:
            UsageError: there is no such cell.
        """
        number = self._last if number is None else number
        if number is None or number not in self._shown:
            raise UsageError(_missing(number, [*self._shown], "that a notebook shows"))
        return self._shown[number]

    def read(self, which: str | None) -> Kept:
        """Returns what a cell has logged, and what its calls cost.

        Args:
            which: the notebook's number of it, or a file of an earlier one; None for the last one.

        Raises:
            UsageError: there is no such cell, or nothing is known of it.
        """
        number = int(which) if which and which.isdecimal() else self._last
        path = Path(which).expanduser() if which and not which.isdecimal() else None
        if path is None and number in self._files:
            path = self._files[number]
        if path is None:
            raise UsageError(_missing(number, [*self._files], "that logged or made collectives"))
        try:
            return Kept.read(path)
        except (OSError, EOFError, ValueError, TypeError) as error:
            raise UsageError(f"expected a cell's file, found {path}: {error}") from None


def _missing(number: int | None, there: list[int], what: str) -> str:
    found = ", ".join(map(str, sorted(there))) or "none so far"
    asked = "" if number is None else f", and In[{number}] is none of them"
    return f"expected the number of a cell {what}, found {found}{asked}"


def _sweep(folder: Path) -> None:
    """Removes the oldest cells' files, where they are too many or too large."""
    found = sorted(folder.glob(_NAME.format("*")), key=lambda path: path.stat().st_mtime)
    nbytes = 0
    for count, path in enumerate(reversed(found)):
        nbytes += path.stat().st_size
        if count and (count >= _FILES or nbytes > _FILES_NBYTES):
            path.unlink()
