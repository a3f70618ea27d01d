"""A limit for a wait that a process looks at again and again."""

from __future__ import annotations

import time

_LONGEST_SECONDS = 1.0


class Countdown:
    """How long a wait may still last.

    Of the time between two looks, one second counts at most: a process that stood still has not
    read what came meanwhile, and on a busy machine the processes that it waits for stood still too.
    """

    def __init__(self, seconds: float) -> None:
        self._left, self._looked = seconds, time.monotonic()

    def left(self) -> float:
        """Returns the seconds that are left; 0 or less once the time is over."""
        now = time.monotonic()
        self._left -= min(now - self._looked, _LONGEST_SECONDS)
        self._looked = now
        return self._left
