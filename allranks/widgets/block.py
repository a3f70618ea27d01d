"""A stretch of text output of several ranks, between two pictures or the ends of a cell."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.widgets.fold import Line, Row, merge
from allranks.widgets.text import RankText, render


class Block:
    """Collects the ranks' lines and renders them.

    Args:
        ranks: whose lines are to come.
        fold: whether identical lines of several ranks are shown once.
        noun: what they are called.
    """

    def __init__(self, ranks: Sequence[int], fold: bool, noun: str = "rank") -> None:
        self.fold = fold
        self.noun = noun
        self.texts = {rank: RankText() for rank in ranks}

    def feed(self, rank: int, kind: str, text: str) -> None:
        """Takes in text of a rank."""
        self.texts.setdefault(rank, RankText()).feed(kind, text)

    def clear(self, rank: int) -> None:
        """Forgets a rank's lines."""
        if rank in self.texts:
            self.texts[rank].clear()

    def render(self, extra: Sequence[tuple[int, str]] = ()) -> str:
        """Returns the block as labelled text.

        Args:
            extra: a rank and a note each, shown last.
        """
        lines = {rank: text.lines for rank, text in self.texts.items()}
        if self.fold:
            rows = merge(lines)
        else:
            rows = [Row((rank,), line) for rank in sorted(lines) for line in lines[rank]]
        rows += [Row((rank,), Line("note", note)) for rank, note in extra]
        return render(rows, self.noun)
