"""A clock, and a limit, for what a process waits for."""

from __future__ import annotations

import time

_LONGEST_SECONDS = 1.0


class AwakeClock:
    """A clock that stands while its process stands still.

    Of the time between two looks, one second counts at most: a process that stood still has not
    read what came meanwhile, and on a busy machine the processes that it waits for stood still too.
    """

    def __init__(self) -> None:
        self._now, self._looked = 0.0, time.monotonic()

    def now(self) -> float:
        """Returns the seconds since this clock was made."""
        looked = time.monotonic()
        self._now += min(looked - self._looked, _LONGEST_SECONDS)
        self._looked = looked
        return self._now


class Countdown:
    """How long a wait, in which its process looks again and again, may still last."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._clock = seconds, AwakeClock()

    def left(self) -> float:
        """Returns the seconds that are left; 0 or less once the time is over."""
        return self._seconds - self._clock.now()
