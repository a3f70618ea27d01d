"""Asks ranks to tell how they spend their time, for as long as somebody looks at it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from allranks.records import requests
from allranks.widgets.dashboard.figures import Figures

if TYPE_CHECKING:
    from allranks.widgets.dashboard.clicks import Ask

#: A rank that has told nothing for so long is asked again: it may have come to the cell later, or
#: in the place of one that died. Each time the wait is twice as long.
_AGAIN_SECONDS = 3.0


class Watching:
    """Whether the ranks of a cell have been asked to tell.

    Args:
        figures: what they have told.
    """

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._looks = False
        self._wait, self._again_at = _AGAIN_SECONDS, 0.0

    def step(self, looks: bool, ask: Ask) -> None:
        """Asks whom it has to ask, now that somebody looks or does not."""
        if not (looks or self._looks):
            return  # as nearly always: this is called with every message
        now, strips = time.monotonic(), self._figures.strips
        if looks != self._looks:
            self._looks, self._wait, self._again_at = looks, _AGAIN_SECONDS, now + _AGAIN_SECONDS
            self._ask(ask, strips.bins if looks else 0, self._running())
        elif now >= self._again_at:
            self._wait *= 2
            self._again_at = now + self._wait
            since = self._figures.elapsed - _AGAIN_SECONDS
            silent = [rank for rank in self._running() if strips.seconds(rank) < since]
            self._ask(ask, strips.bins, silent)

    def _running(self) -> list[int]:
        return [tile.rank for tile in self._figures.tiles.tiles.values() if not tile.gone]

    def _ask(self, ask: Ask, bins: int, ranks: list[int]) -> None:
        if ranks:
            ask(requests.STRIPS, {"bins": bins}, lambda _: None, ranks)
