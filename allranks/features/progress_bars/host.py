"""For libraries that are preloaded, before the ranks are forked."""

from __future__ import annotations

from allranks.engine.features import HostFeature
from allranks.features.progress_bars.text_bars import show_progress_as_text
from allranks.records.config import HostAgentConfig


class PreloadedBars(HostFeature):
    """Draws text in the host agent, from which the ranks are forked."""

    def started(self, config: HostAgentConfig) -> None:
        show_progress_as_text()


FEATURE = PreloadedBars
