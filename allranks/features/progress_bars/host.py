"""For libraries that are preloaded, before the ranks are forked."""

from __future__ import annotations

from allranks.engine.host.features import HostContext, HostFeature
from allranks.features.progress_bars.text_bars import show_progress_as_text


class PreloadedBars(HostFeature):
    """Draws text in the host agent, from which the ranks are forked."""

    def started(self, host: HostContext) -> None:
        show_progress_as_text()


FEATURE = PreloadedBars
