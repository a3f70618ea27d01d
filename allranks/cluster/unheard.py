"""Ranks that have not left a cell after an interrupt: which they are, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from allranks.records import requests
from allranks.records.ranks import label
from allranks.records.wire import Answer

UNHEARD_SECONDS = 2.0
"""After an interrupt: by then a rank that hears has left its cell, or tidies up."""
GRACE_SECONDS = 10.0
"""After a time-out's interrupt: so long ranks may take to leave the cell."""
_ASK_SECONDS = 0.5
"""So long before it is said, the ranks are asked where they are."""

AskSoon = Callable[[str, dict[str, Any], Callable[[Answer], None], Iterable[int]], None]


class Unheard:
    """What is known of the ranks of one cell, or member, that was interrupted.

    Args:
        ask_soon: makes a request of ranks while they are busy.
    """

    def __init__(self, ask_soon: AskSoon) -> None:
        self._ask_soon = ask_soon
        self._asked = self._said = False
        #: Where each rank was seen last.
        self.lines: dict[int, str] = {}

    def due(self, waited: float, pending: Sequence[int]) -> bool:
        """Whether it is time to say where the ranks are; true once, and they are asked before.

        Args:
            waited: seconds since the interrupt.
            pending: the ranks that are still in the cell.
        """
        if waited >= UNHEARD_SECONDS - _ASK_SECONDS and not self._asked:
            self._asked = True
            self._ask_soon(requests.STATUS, {}, self._take_status, pending)
        if waited < UNHEARD_SECONDS or self._said:
            return False
        self._said = True
        return True

    def _take_status(self, answer: Answer) -> None:
        line = str(answer.content.get("line") or "")
        if line:
            self.lines[answer.rank] = line

    def whereabouts(self, pending: Sequence[int]) -> str:
        """Returns which ranks are still in the cell, and where."""
        lines: dict[str, list[int]] = {}
        for rank in pending:
            lines.setdefault(self.lines.get(rank, ""), []).append(rank)
        return "; ".join(
            f"{label(ranks)} at {line}" if line else f"{label(ranks)}, which does not answer"
            for line, ranks in lines.items()
        )
