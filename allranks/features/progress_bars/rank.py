"""For libraries that a cell imports."""

from __future__ import annotations

from allranks.engine.features import RankFeature
from allranks.features.progress_bars.text_bars import show_progress_as_text


class RankBars(RankFeature):
    """Draws text in one rank."""

    def starting(self) -> None:
        show_progress_as_text()


FEATURE = RankBars
