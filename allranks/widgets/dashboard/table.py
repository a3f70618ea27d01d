"""A table of words and numbers, as text or as what a page makes of it."""

from __future__ import annotations

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
