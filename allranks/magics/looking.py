"""The commands that look back at cells that have ended: ``last``, ``compare`` and ``export``."""

from __future__ import annotations

from pathlib import Path

from IPython.display import display

from allranks.errors import UsageError
from allranks.magics.options import CommandOptions
from allranks.records.ranks import label
from allranks.records.ranks import parse as parse_ranks
from allranks.widgets.cell_history import CellHistory, compared, export, is_number

COMMANDS = ("last", "compare", "export")


def look(command: str, options: CommandOptions, past: CellHistory) -> None:
    """Does what a command says.

    Args:
        command: one of :data:`COMMANDS`.
        options: what stands behind it.
        past: the cells of the notebook.

    Raises:
        UsageError: there are no such cells, or a file cannot be written.
    """
    words = options.names
    if command == "last":
        _last(words, past)
    elif command == "compare":
        _compare(words, options.ranks, past)
    else:
        _export(words, past)


def _last(words: list[str], past: CellHistory) -> None:
    if len(words) > 1 or not all(is_number(word) for word in words):
        raise UsageError(
            f"expected one cell number, found {' '.join(words):.60}. "
            "Type for example: %distributed last 12"
        )
    for data, metadata in past.shown(int(words[0]) if words else None):
        display(data, metadata=metadata, raw=True)


def _compare(words: list[str], ranks: str | None, past: CellHistory) -> None:
    if len(words) < 2:
        raise UsageError(
            f"expected two cell numbers or more, found {' '.join(words) or 'none'}. "
            "Type for example: %distributed compare 12 15"
        )
    cells = [past.read(word) for word in words]
    chosen = None
    if ranks is not None:
        there = {curve["rank"] for cell in cells for curve in cell.curves}
        chosen = parse_ranks(ranks, max(there, default=0) + 1)
    shown = compared(cells, chosen)
    display(shown, raw=True)


def _export(words: list[str], past: CellHistory) -> None:
    if not 1 <= len(words) <= 2:
        raise UsageError(
            f"expected a folder and optionally a cell number, found {' '.join(words) or 'none'}. "
            "Type for example: %distributed export results/run1 12"
        )
    cell = past.read(words[1] if len(words) == 2 else None)
    try:
        files = export(cell, Path(words[0]).expanduser())
    except OSError as error:
        raise UsageError(f"expected a folder that can be written, found: {error}") from None
    missing = f"; {cell.missing:,} logged values are missing" if cell.missing else ""
    print(f"{label([cell.number], 'cell')}: {', '.join(map(str, files))}{missing}")
