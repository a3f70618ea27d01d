"""The text view where output is only added: a terminal, a script, a console of a kernel."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from allranks.records.ranks import label
from allranks.records.wire import Output
from allranks.widgets.displays import Data, is_rich
from allranks.widgets.front_end import TERMINAL, front_end
from allranks.widgets.text import Line, RankText, Row, TextView, hidden_note, merge, render

#: A line is held for so long, for ranks that write the same one a moment later.
_HOLD_SECONDS = 0.25
#: What is updated is printed again, at most so often, as it then is.
_UPDATE_SECONDS = 2.0
_RICH = "rich"


class TerminalView(TextView):
    """Prints labelled lines of ranks on standard output, and figures where they can be seen.

    Args:
        ranks: the ranks whose output is to come.
        log_dir: where their logs are.
        fold: whether identical output of several ranks is printed once.
        noun: what they are called.
    """

    def __init__(
        self, ranks: Sequence[int], log_dir: str = "", fold: bool = True, noun: str = "rank"
    ) -> None:
        super().__init__(ranks, log_dir, fold, noun)
        self._in_kernel = front_end() != TERMINAL
        self._texts = {rank: RankText() for rank in ranks}
        self._oldest: float | None = None
        #: Of each rank, what it has updated and that is not printed yet.
        self._updated: dict[int, dict[str, tuple[Data, Data]]] = {}
        self._next_update = 0.0
        self._rich: dict[str, tuple[Data, Data]] = {}

    def output(self, batch: Output) -> None:
        """Takes in what a rank wrote."""
        text = self._texts.setdefault(batch.rank, RankText())
        for kind, *rest in batch.entries:
            if kind == "update":
                data, metadata, name = rest
                self._updated.setdefault(batch.rank, {})[name or ""] = data, metadata
                continue
            if kind == "clear":
                text.clear()
                self._updated.pop(batch.rank, None)
                continue
            self._print_updated(batch.rank)
            if kind in ("out", "err"):
                text.feed(kind, rest[0])
            elif kind == "notice":
                text.feed("note", rest[0] + "\n")
            elif kind == "hidden":
                note = hidden_note(rest[0], rest[1], self._log(batch.rank))
                text.feed("note", note + "\n")
            else:
                self._display(batch.rank, kind, rest[0], rest[1])
        if batch.entries and self._oldest is None:
            self._oldest = time.monotonic()

    def _print_updated(self, rank: int) -> None:
        """Takes what a rank has updated as lines, before those that it writes now."""
        for data, metadata in self._updated.pop(rank, {}).values():
            self._display(rank, "display", data, metadata)

    def _display(self, rank: int, kind: str, data: Data, metadata: Data) -> None:
        text = self._texts.setdefault(rank, RankText())
        if self._in_kernel and is_rich(data):
            # The same one of several ranks is folded as a line is.
            name = repr((data, metadata))
            self._rich[name] = data, metadata
            text.add(Line(_RICH, name))
            return
        plain = str(data.get("text/plain", f"<{', '.join(data)}>"))
        text.feed("value" if kind == "result" else "out", plain + "\n")

    def notice(self, text: str) -> None:
        """Prints a line about the cell as a whole."""
        self._print()
        self.write(f"· {text}")

    def say(self, text: str) -> None:
        """Prints a line that is nobody's own."""
        self.notice(text)

    def show_text(self, text: str) -> None:
        """Prints a text as it is."""
        self._print()
        self.write(text)

    def write(self, text: str) -> None:
        """Prints lines."""
        print(text, file=sys.stdout, flush=True)

    def make_way(self) -> None:
        """Prints everything: a person is asked below it."""
        self._print()

    def refresh(self) -> None:
        """Prints the lines that have been held long enough."""
        if self._oldest is not None and time.monotonic() - self._oldest >= _HOLD_SECONDS:
            self._print(ended_only=True)

    def finish(self) -> None:
        """Prints everything."""
        self._print()

    def _print(self, ended_only: bool = False) -> None:
        if self._updated and (not ended_only or time.monotonic() >= self._next_update):
            self._next_update = time.monotonic() + _UPDATE_SECONDS
            for rank in list(self._updated):
                self._print_updated(rank)
        taken = {rank: text.take(ended_only) for rank, text in self._texts.items()}
        self._oldest = time.monotonic() if self._updated else None
        if self.fold:
            rows = merge(taken)
        else:
            rows = [row for rank in taken for row in merge({rank: taken[rank]})]
        for is_line, some in groupby(rows, lambda row: row.line.kind != _RICH):
            if is_line:
                self.write(render(list(some), self.noun))
            else:
                for row in some:
                    self._show_rich(row)
        self._rich.clear()

    def _show_rich(self, row: Row) -> None:
        from IPython.display import display

        show: Any = display
        data, metadata = self._rich[row.line.text]
        self.write(f"{label(row.ranks, self.noun)}:")
        show(data, raw=True, metadata=metadata)
