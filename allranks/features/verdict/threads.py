"""How long threads that read data are on cores. Runs in every rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from itertools import chain
from operator import call
from time import clock_gettime, monotonic, sleep

from allranks.collectives.calls.frames import no_collection

#: It gets longer by about 5 ms where Python code holds the interpreter.
_MOMENT_SECONDS = 1e-3
#: On Linux. Without the lock of the interpreter a thread may end while its clock is asked for.
_HAS_CLOCKS = (
    hasattr(time, "pthread_getcpuclockid") and getattr(sys, "_is_gil_enabled", lambda: True)()
)


class ReadingThreads:
    """Counts the time on cores of threads that have been found to read data.

    A thread of a library's pool may also do other work, so those are looked at twice that read.
    """

    def __init__(self) -> None:
        self._clocks: dict[int, float] = {}
        self._seconds = 0.0

    @property
    def are_found(self) -> bool:
        return bool(self._clocks)

    def count(self, reading: Collection[int]) -> tuple[float, float]:
        """Returns the seconds of all threads that have been found so far, and how many cores those
        that read now use for a moment.

        Args:
            reading: the threads, as `sys._current_frames` names them.
        """
        found = [clock for thread in reading for clock in _clock(thread)] if _HAS_CLOCKS else []
        for clock in found:
            self._clocks.setdefault(clock, _seconds(clock))
        for clock, before in list(self._clocks.items()):
            if (now := _seconds(clock)) < max(0.0, before):  # the thread has ended
                del self._clocks[clock]
            else:
                self._clocks[clock] = now
                self._seconds += now - before
        return self._seconds, _cores_used(found) if found else 0.0


def _cores_used(clocks: Collection[int]) -> float:
    began, before = monotonic(), [_seconds(clock) for clock in clocks]
    sleep(_MOMENT_SECONDS)
    after = [_seconds(clock) for clock in clocks]
    used = sum(max(0.0, b - a) for a, b in zip(before, after, strict=True))
    return used / (monotonic() - began)


@no_collection()
def _clock(thread: int) -> list[int]:
    """Returns the clock of a thread as the only one of a list, which is empty if it has ended.

    `time.pthread_getcpuclockid` reads memory that a thread has while it lives. It lives while it
    has frames and another thread has the interpreter: this one runs no bytecode between both calls.
    """
    threads = chain.from_iterable(map(call, [sys._current_frames]))
    return [*map(time.pthread_getcpuclockid, filter(thread.__eq__, threads))]


def _seconds(clock: int) -> float:
    try:
        return clock_gettime(clock)
    except OSError:  # its thread has ended
        return -1.0
