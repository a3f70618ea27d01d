"""What is kept of a cell in a file: its curves, its calls and its members; and the same as CSV."""

from __future__ import annotations

import base64
import csv
import gzip
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allranks.widgets.dashboard.curves import Key
from allranks.widgets.dashboard.figures import Figures

#: Compressed for speed: it is written when a cell ends.
_LEVEL = 1


@dataclass(frozen=True)
class Kept:
    """One cell. ``noun`` says whose its curves are: ``rank`` or ``member``."""

    number: int
    noun: str
    seconds: float
    curves: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    members: list[dict[str, Any]]

    def write(self, path: Path) -> None:
        """Writes it into a file."""
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=_LEVEL) as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, path: Path) -> Kept:
        """Returns what a file holds."""
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return cls(**json.load(file))

    def points(self) -> Iterable[tuple[Key, list[tuple[float, float]]]]:
        """Returns each curve with its steps and values."""
        for curve in self.curves:
            pairs = array("d", base64.b64decode(curve["points"]))
            points = [*zip(pairs[::2], pairs[1::2], strict=True)]
            # The last value stands there once more, as thinning may have taken it.
            if points[-2:-1] == points[-1:]:
                points.pop()
            yield Key(curve["name"], curve["rank"], curve["member"]), points


def kept(number: int, figures: Figures) -> Kept:
    """Returns what is kept of a cell."""
    curves = [
        {**key._asdict(), "points": base64.b64encode(series.points().tobytes()).decode("ascii")}
        for key, series in figures.curves.series.items()
    ]
    calls = [vars(row) for row in figures.timings.by_call()]
    members = figures.members.everything()["rows"] if figures.members is not None else []
    return Kept(number, figures.noun, figures.elapsed, curves, calls, members)


def export(cell: Kept, folder: Path) -> list[Path]:
    """Writes a cell's curves, calls and members as CSV; returns the files.

    Args:
        cell: what is kept of it.
        folder: where they are to be; it is made if it is not there.

    Raises:
        OSError: they cannot be written there.
    """
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
