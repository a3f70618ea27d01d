"""Tables, and numbers as people read them: 0.0123, 1.5 ms, 4 MB."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text under a head; columns of words stand to the left, those of numbers right."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""
    words: tuple[int, ...] = (0,)

    def text(self) -> str:
        """Returns the table as lines of text."""
        every = [self.head, *self.rows]
        widths = [max(len(row[i]) for row in every) for i in range(len(self.head))]
        lines = [self.title] if self.title else []
        for row in every:
            cells = [
                cell.ljust(width) if i in self.words else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])


def number(value: float, digits: int = 4) -> str:
    """Returns a number with so many digits, as ``0.01234`` or ``1.5e-07``."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.{digits}g}"


def labels(values: Sequence[float]) -> list[str]:
    """Returns different numbers as different words, with as few digits as that takes."""
    for digits in range(4, 17):
        words = [number(value, digits) for value in values]
        if len(set(words)) == len(set(values)):
            break
    return words


def seconds(value: float) -> str:
    """Returns a duration, as ``12.3 s``, ``4.5 ms`` or ``67 µs``."""
    if value >= 60:
        return f"{int(value // 60)} min {value % 60:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.0f} µs"


def seconds_like(value: float, most: float) -> str:
    """Returns a duration of a column whose longest is ``most``: all have the same unit."""
    if most >= 60:
        whole = round(value)
        return f"{whole // 60} min {whole % 60:02d} s"
    unit, size = next(
        ((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if most >= size), ("µs", 1e-6)
    )
    decimals = sum(most < bound * size for bound in (10, 100))
    return f"{value / size:.{decimals}f} {unit}"


def nbytes(value: float) -> str:
    """Returns a size, as ``4 MB``, in powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def gbps(value: float | None) -> str:
    """Returns a bandwidth, or n/a where there is none."""
    return "n/a" if value is None else f"{nbytes(value * 1e9)}/s"
