"""``%distributed last``, ``compare`` and ``export``: what the cells of a notebook have shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allranks.cluster.features import NotebookFeature
from allranks.cluster.options import LineCommand
from allranks.errors import UsageError
from allranks.features.history.cell_history import CellHistory, compared, export, is_number
from allranks.records.ranks import label
from allranks.records.ranks import parse as parse_ranks

_NUMBERS = "the numbers of cells, as in In[N], or files cell-N.json.gz of earlier ones"


class NotebookHistory(NotebookFeature):
    """Keeps what cells have shown, and the values that they have logged."""

    commands = frozenset({"shown_by_cell"})
    line_commands = (
        LineCommand(
            "last",
            "draws the last cell again, or cell N: its output, curves and communication",
            words="N",
            words_about="the number of a cell, as in In[N]",
        ),
        LineCommand(
            "compare",
            "draws the curves of several cells in one plot, for example: compare 12 15",
            arguments={"cells": {"nargs": "*", "metavar": "N", "help": _NUMBERS}},
            chooses_ranks=True,
        ),
        LineCommand(
            "export",
            "writes curves and calls of the last cell, or cell N, into FOLDER as CSV",
            words="FOLDER N",
            words_about="the folder for the files, and the number of the cell",
        ),
    )

    def __init__(self) -> None:
        self._past = CellHistory()

    def cell_shown(self, number: int, view: Any, folder: str) -> None:
        self._past.last = number
        has_data = hasattr(view, "outputs") or getattr(view, "figures", None) is not None
        # Most cells in a terminal have none. An earlier attempt of this one may have had some.
        if has_data or number in self._past.files:
            self._past.keep(number, view, folder)

    def command(self, name: str, *arguments: Any) -> Any:
        (asked,) = arguments
        if name == "shown_by_cell":
            return self._past.shown(asked)
        if name == "last":
            return self._last(asked)
        if name == "compare":
            words = [word for part in asked["cells"] for word in part.split(",") if word]
            return self._compare(words, asked["ranks"])
        return self._export(asked)

    # IPython is imported at the first use: a script may not need it.

    def _last(self, words: list[str]) -> None:
        if len(words) > 1 or not all(is_number(word) for word in words):
            raise UsageError(
                f"expected one cell number, found {' '.join(words):.60}. "
                "Type for example: %distributed last 12"
            )
        from IPython.display import display

        for data, metadata in self._past.shown(int(words[0]) if words else None):
            display(data, metadata=metadata, raw=True)

    def _compare(self, words: list[str], ranks: str | None) -> None:
        if len(words) < 2:
            raise UsageError(
                f"expected two cell numbers or more, found {' '.join(words) or 'none'}. "
                "Type for example: %distributed compare 12 15"
            )
        from IPython.display import display

        cells = [self._past.read(word) for word in words]
        chosen = None
        if ranks is not None:
            there = {curve["rank"] for cell in cells for curve in cell.curves}
            chosen = parse_ranks(ranks, max(there, default=0) + 1)
        display(compared(cells, chosen), raw=True)

    def _export(self, words: list[str]) -> str:
        if not 1 <= len(words) <= 2:
            raise UsageError(
                f"expected a folder and optionally a cell number, found {' '.join(words) or 'none'}"
                ". Type for example: %distributed export results/run1 12"
            )
        cell = self._past.read(words[1] if len(words) == 2 else None)
        try:
            files = export(cell, Path(words[0]).expanduser())
        except OSError as error:
            raise UsageError(
                f"expected a folder that can be written, found: {error}. Type for example: "
                "%distributed export ~/results"
            ) from None
        missing = f"; {cell.missing:,} logged values are missing" if cell.missing else ""
        return f"{label([cell.number], 'cell')}: {', '.join(map(str, files))}{missing}"


FEATURE = NotebookHistory
