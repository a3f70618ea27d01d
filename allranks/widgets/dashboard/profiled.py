"""The button that has the running cell profiled for some seconds, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from allranks.records.profile import Profile
from allranks.widgets.shown import Data

SECONDS = 5.0
#: Has the running cell profiled for so many seconds, and shows what its ranks have seen: returns
#: why that is not possible, or "".
Profiler = Callable[[Callable[[Sequence[Profile]], object], float], str]

_BEGUN = f"profiling the next {SECONDS:g} s"
_THERE = "the flame graph is below"
_NOTHING = "no rank could be looked at in this cell: there is no flame graph"


class Profiled:
    """Profiles of one cell, taken from its panel.

    Args:
        profiler: takes them.
        show: shows a picture below the panel.
        say: tells pages of it.
    """

    def __init__(
        self, profiler: Profiler, show: Callable[[Data], object], say: Callable[..., Any]
    ) -> None:
        self._profiler = profiler
        self._show = show
        self._say = say

    def begin(self) -> None:
        """Begins one, if none is being taken."""
        problem = self._profiler(self._take, SECONDS)
        self._say(profiled=problem or _BEGUN)

    def _take(self, profiles: Sequence[Profile]) -> None:
        if not profiles:
            self._say(profiled=_NOTHING)
            return
        # Nobody has it in memory who has taken no profile.
        from allranks.widgets.flame.show import bundle

        self._show(bundle(profiles))
        self._say(profiled=_THERE)
