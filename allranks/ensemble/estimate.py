"""How long an ensemble will take still, from how long its members have taken so far."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

#: One duration says nothing of how durations differ.
_LEAST_SEEN = 3
_DRAWS = 40
_STEPS = 8000


def remaining_seconds(
    taken: Sequence[float], running: Sequence[float], waiting: int, slots: int
) -> tuple[float, float] | None:
    """Returns two numbers of seconds between which the end will come, eight times in ten.

    The rest is played through many times, every member's duration drawn from those seen so far; of
    a member that runs, from those longer than what it has taken. It cannot know that the members
    to come are of another kind.

    Args:
        taken: the seconds of members that have ended.
        running: for each that runs, its seconds so far.
        waiting: how many are still to start.
        slots: how many run at once.

    Returns:
        None while fewer than three have ended.
    """
    if len(taken) < _LEAST_SEEN or slots < 1:
        return None
    source = random.Random(0)
    ends = []
    for _ in range(max(5, min(_DRAWS, _STEPS // (waiting + 1)))):
        free = [_left(source, taken, elapsed) for elapsed in running]
        free += [0.0] * (slots - len(free))
        heapq.heapify(free)
        for _ in range(waiting):
            heapq.heapreplace(free, free[0] + source.choice(taken))
        ends.append(max(free))
    ends.sort()
    return ends[len(ends) // 10], ends[-1 - len(ends) // 10]


def _left(source: random.Random, taken: Sequence[float], elapsed: float) -> float:
    longer = [seconds for seconds in taken if seconds > elapsed]
    if longer:
        return source.choice(longer) - elapsed
    # Longer than any before: nobody knows; as long again at most is a guess.
    return elapsed * source.random()
