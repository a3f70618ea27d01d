"""The text view of a terminal or a script: lines are printed once, soon after they come."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from allranks.records.wire import Output
from allranks.widgets.fold import merge
from allranks.widgets.quiet import Quiet
from allranks.widgets.text import RankText, hidden_note, render

#: A line is held for so long, for ranks that write the same one a moment later.
_HOLD_SECONDS = 0.25


class TerminalView(Quiet):
    """Prints labelled lines of ranks on standard output.

    Args:
        ranks: the ranks whose output is to come.
        log_dir: where their logs are.
        fold: whether identical output of several ranks is printed once.
        noun: what they are called.
    """

    def __init__(
        self, ranks: Sequence[int], log_dir: str = "", fold: bool = True, noun: str = "rank"
    ) -> None:
        self.noun = noun
        #: Where the log of one is that has none of its own name.
        self.log_of: dict[int, str] = {}
        self.log_dir = log_dir
        self.fold = fold
        self._texts = {rank: RankText() for rank in ranks}
        self._oldest: float | None = None

    def output(self, batch: Output) -> None:
        """Takes in what a rank wrote."""
        text = self._texts.setdefault(batch.rank, RankText())
        for kind, *rest in batch.entries:
            if kind in ("out", "err"):
                text.feed(kind, rest[0])
            elif kind == "notice":
                text.feed("note", rest[0] + "\n")
            elif kind == "hidden":
                note = hidden_note(rest[0], rest[1], self._log(batch.rank))
                text.feed("note", note + "\n")
            elif kind == "clear":
                text.clear()
            elif kind in ("result", "display", "update"):
                plain = str(rest[0].get("text/plain", f"<{', '.join(rest[0])}>"))
                text.feed("value" if kind == "result" else "out", plain + "\n")
        if batch.entries and self._oldest is None:
            self._oldest = time.monotonic()

    def notice(self, text: str) -> None:
        """Prints a line about the cell as a whole."""
        self._print()
        print(f"· {text}", flush=True)

    def say(self, text: str) -> None:
        """Prints a line that is nobody's own."""
        self.notice(text)

    def show_text(self, text: str) -> None:
        """Prints a text as it is."""
        self._print()
        print(text, flush=True)

    def refresh(self) -> None:
        """Prints the lines that have been held long enough."""
        if self._oldest is not None and time.monotonic() - self._oldest >= _HOLD_SECONDS:
            self._print(ended_only=True)

    def finish(self) -> None:
        """Prints everything."""
        self._print()

    def _log(self, rank: int) -> str:
        default = f"{self.log_dir}/rank-{rank}.log" if self.log_dir else ""
        return self.log_of.get(rank, default)

    def _print(self, ended_only: bool = False) -> None:
        taken = {rank: text.take(ended_only) for rank, text in self._texts.items()}
        self._oldest = None
        if not any(taken.values()):
            return
        if self.fold:
            rows = merge(taken)
        else:
            rows = [row for rank in taken for row in merge({rank: taken[rank]})]
        print(render(rows, self.noun), file=sys.stdout, flush=True)
