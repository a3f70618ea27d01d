"""The cells of a notebook that have ended: their displays, files of their values, comparisons."""

from __future__ import annotations

import base64
import csv
import gzip
import json
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allranks.errors import UsageError
from allranks.widgets.dashboard.cell_model import CellModel, Logs
from allranks.widgets.dashboard.curves import Key
from allranks.widgets.dashboard.plot import PlotStyle
from allranks.widgets.dashboard.saved_panel import bundle
from allranks.widgets.dashboard.tables import seconds
from allranks.widgets.dashboard.view import LivePanel
from allranks.widgets.text import Data

#: Displays of this many cells are kept.
_CELLS = 30
#: The files of one cluster, beside its logs; the oldest go first.
_FILES, _FILES_NBYTES = 100, 64 << 20
_FILE_NAME = "cell-{}.json.gz"
# The cells for which `CellModel.worth_showing` is true, and those with members.
_KEPT = "that logged values, ran members, or spent 1 s in 20 or more collectives"


class CellHistory:
    """The cells of a notebook that have ended."""

    def __init__(self) -> None:
        self._shown: dict[int, list[tuple[Data, Data]]] = {}
        self.files: dict[int, Path] = {}
        """The files of the values of cells, by their numbers."""
        self.last: int | None = None
        """The number of the last one, also if there is nothing of it to keep."""

    def keep(self, number: int, view: Any, folder: str) -> None:
        """Keeps what a cell has shown and logged, once it has ended.

        In a notebook ``view`` has ``outputs``, with curves ``figures``; ``folder`` has the logs.
        """
        self._shown.pop(number, None)
        if (outputs := getattr(view, "outputs", None)) is not None:
            self._shown[number] = outputs()
        for old in [*self._shown][:-_CELLS]:
            del self._shown[old]
        figures = getattr(view, "figures", None)
        self.files.pop(number, None)
        if figures is None or not (figures.worth_showing() or figures.members):
            return
        path = Path(folder) / _FILE_NAME.format(number)
        with suppress(OSError):  # a full disk, or a folder that was removed: the cell is done
            save_cell(number, figures).write(path)
            self.files[number] = path
            _sweep(path.parent)

    def shown(self, number: int | None) -> list[tuple[Data, Data]]:
        """Returns the output of a cell, as display data with metadata; of the last one for None.

        Raises UsageError if there is no such cell.
        """
        number = self.last if number is None else number
        if number is None or number not in self._shown:
            raise UsageError(_missing(number, [*self._shown], "that a notebook shows"))
        return self._shown[number]

    def read(self, which: str | None) -> SavedCell:
        """Returns the data of a cell: by its number, or from a file of an earlier one.

        None is the last cell. Raises UsageError if there is no such cell, or no data of it.
        """
        number = int(which) if which and is_number(which) else self.last
        path = Path(which).expanduser() if which and not is_number(which) else None
        if path is None and number in self.files:
            path = self.files[number]
        if path is None:
            raise UsageError(_missing(number, [*self.files], _KEPT))
        try:
            return SavedCell.read(path)
        except (OSError, EOFError, ValueError, TypeError) as error:
            raise UsageError(f"expected a cell's file, found {path}: {error}") from None


def is_number(word: str) -> bool:
    """Whether a word can be the number of a cell; else it is the name of a file."""
    return word.isdecimal() and len(word) < 10


def _missing(number: int | None, there: list[int], what: str) -> str:
    found = ", ".join(map(str, sorted(there))) or "none so far"
    asked = "" if number is None else f", and In[{number}] is none of them"
    advice = "Type one of these numbers" if there else "Run such a cell first"
    return f"expected the number of a cell {what}, found {found}{asked}. {advice}"


def _sweep(folder: Path) -> None:
    found = sorted(folder.glob(_FILE_NAME.format("*")), key=lambda path: path.stat().st_mtime)
    nbytes = 0
    for count, path in enumerate(reversed(found)):
        nbytes += path.stat().st_size
        if count and (count >= _FILES or nbytes > _FILES_NBYTES):
            path.unlink()


#: Compressed for speed: it is written when a cell ends.
_LEVEL = 1


@dataclass(frozen=True)
class SavedCell:
    """The data of one cell.

    ``noun`` is the owner of its curves: ``rank`` or ``member``. ``missing`` counts logged values
    that are not in ``curves``: a rank logged faster than it could send, or the disk was full.
    """

    number: int
    noun: str
    seconds: float
    curves: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    members: list[dict[str, Any]]
    missing: int = 0

    def write(self, path: Path) -> None:
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=_LEVEL) as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, path: Path) -> SavedCell:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return cls(**json.load(file))

    def points(self) -> Iterable[tuple[Key, list[tuple[float, float]]]]:
        for curve in self.curves:
            pairs = array("d", base64.b64decode(curve["points"]))
            points = [*zip(pairs[::2], pairs[1::2], strict=True)]
            yield Key(curve["name"], curve["rank"], curve["member"]), points


def save_cell(number: int, figures: CellModel) -> SavedCell:
    curves = []
    for key, (steps, values) in figures.logged.read().items():
        pairs = array("d", bytes(16 * len(steps)))
        pairs[::2], pairs[1::2] = steps, values
        curves.append({**key._asdict(), "points": base64.b64encode(pairs).decode("ascii")})
    calls = [vars(row) for row in figures.timings.by_call()]
    members = figures.members.everything()["rows"] if figures.members is not None else []
    missing = figures.logged.missing + sum(figures.curves.dropped.values())
    return SavedCell(number, figures.noun, figures.elapsed, curves, calls, members, missing)


def export(cell: SavedCell, folder: Path) -> list[Path]:
    """Writes a cell's curves, calls and members as CSV into a folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    second = "rank" if cell.noun == "member" else "member"
    rows = [[*key, step, value] for key, points in sorted(cell.points()) for step, value in points]
    written = [_write(folder / "curves.csv", ["name", cell.noun, second, "step", "value"], rows)]
    for name, told in (("timings.csv", cell.calls), ("members.csv", cell.members)):
        if told:
            written.append(_write(folder / name, [*told[0]], [[*row.values()] for row in told]))
    return written


def _write(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(head)
        table.writerows(rows)
    return path


def compared(cells: Sequence[SavedCell], ranks: Sequence[int] | None = None) -> dict[str, str]:
    """Returns a view of the curves of several cells, one a cell: the mean of its (chosen) ranks."""
    figures = CellModel([])
    figures.noun = "cell"
    for cell in cells:
        for (name, member), points in _means(cell, ranks).items():
            steps, values = zip(*points, strict=True)
            figures.curves.add(
                Key(name, cell.number, member), array("d", steps), array("d", values)
            )
    took = (f"In[{cell.number}] took {seconds(cell.seconds)}" for cell in cells)
    whose = "all its ranks" if ranks is None else f"the chosen {cells[0].noun}s"
    figures.title = f"{', '.join(took)}; each curve is the mean of {whose}"
    return LivePanel(figures, Logs([]), "auto").saved(bundle(figures, PlotStyle.of({})))


def _means(
    cell: SavedCell, ranks: Sequence[int] | None
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    # Members in place of ranks have one mean for each name, ranks one for each name and member.
    sums: dict[tuple[str, str], dict[float, list[float]]] = {}
    for key, points in cell.points():
        if ranks is None or key.rank in ranks:
            member = "" if cell.noun == "member" else key.member
            curve = sums.setdefault((key.name, member), {})
            for step, value in points:
                curve.setdefault(step, []).append(value)
    return {
        key: [(step, sum(values) / len(values)) for step, values in sorted(curve.items())]
        for key, curve in sums.items()
    }
