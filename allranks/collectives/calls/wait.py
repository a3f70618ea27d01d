"""Waits that can be left.

An operation is a generator that yields whenever it cannot go on yet. Whoever drives it decides
how to spend the time, hears Ctrl-C between two steps, and asks the watch whether waiting still
makes sense.

The schedule (spin 50 µs, yield until 1 ms, then sleep 5 % of the time waited, between 50 µs and
1 ms) was measured: 1.0–1.5 times a blocking call when nobody is late, 4 % of a core while
somebody is (8 % where no sleep is longer than 0.5 ms). Sleeping at once costs 8–35 times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from time import perf_counter, sleep
from typing import Protocol, TypeVar

T = TypeVar("T")

SPIN_SECONDS = 50e-6
YIELD_SECONDS = 1e-3
ATTEND_SECONDS = 0.02
SHORTEST_SLEEP, LONGEST_SLEEP, SHARE = 5e-5, 2e-3, 0.05


class Awaited(Protocol):
    """What an operation yields: the thing that it waits for."""

    stage: int
    """Changes with every wait that begins: each is given its own spin."""
    longest_sleep: float
    """Seconds; short where MPI moves data meanwhile, which it does only while it is called."""


Steps = Generator[Awaited, None, T]
Attend = Callable[[Awaited, float], None]
"""Called every 20 ms of a long wait with what is awaited and the seconds waited so far; raises
when the wait can never end."""

yield_core = getattr(os, "sched_yield", lambda: sleep(0))


class Pause:
    """The schedule of one wait: each time it is called it spends a moment of it."""

    __slots__ = ("_began", "_spin_seconds")

    def __init__(self, spin_seconds: float = SPIN_SECONDS) -> None:
        self._spin_seconds = spin_seconds
        self._began = perf_counter()

    def __call__(self, longest_sleep: float = LONGEST_SLEEP) -> float:
        """Spins, yields the core or sleeps; returns the seconds waited before."""
        waited = perf_counter() - self._began
        if waited > YIELD_SECONDS:
            sleep(min(longest_sleep, max(SHORTEST_SLEEP, waited * SHARE)))
        elif waited > self._spin_seconds:
            yield_core()
        return waited


def drive(steps: Steps[T], attend: Attend, spin_seconds: float = SPIN_SECONDS) -> T:
    """Runs an operation to its end and returns its result."""
    try:
        awaited = next(steps)
        while True:
            stage, attended, pause = awaited.stage, 0.0, Pause(spin_seconds)
            while awaited.stage == stage:
                waited = pause(awaited.longest_sleep)
                if waited - attended > ATTEND_SECONDS:
                    attended = waited
                    attend(awaited, waited)
                awaited = next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
