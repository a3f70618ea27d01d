"""Finds the shortest sequence of steps that still fails: plays parts of it in fresh sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from tests.fuzz.play import Played, play, source_of

SHORTEN_SECONDS = 600.0
"""How long is looked for a shorter sequence: a few dozen sessions, or a handful of hangs."""


def shortest(steps: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Returns a part of ``steps`` that fails, and of which no step can be left out.

    Args:
        steps: what has failed.
        fails: whether a part of it fails as well.

    Source: Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, 2002.
    """
    left = list(steps)
    if len(left) > 1 and fails(left[-1:]):
        return left[-1:]
    parts = 2
    while len(left) > 1:
        cuts = [len(left) * i // parts for i in range(parts + 1)]
        pieces = [left[a:b] for a, b in pairwise(cuts)]
        rests = [left[:a] + left[b:] for a, b in pairwise(cuts)]
        if found := next((piece for piece in pieces if fails(piece)), None):
            left, parts = found, 2
        elif parts > 2 and (found := next((rest for rest in rests if fails(rest)), None)):
            left, parts = found, parts - 1
        elif parts < len(left):
            parts = min(len(left), 2 * parts)
        else:
            break
    return left


def shorten(played: Played, seconds: float = SHORTEN_SECONDS) -> list[int]:
    """Returns the shortest part found of the steps that were played, with a fault of that kind."""
    kind, deadline = played.fault.kind if played.fault else "", time.monotonic() + seconds

    def fails(steps: Sequence[int]) -> bool:
        if time.monotonic() > deadline:
            return False
        again = play(played.seed, steps)
        return again.fault is not None and again.fault.kind == kind

    return shortest(played.steps, fails)


def report(played: Played, steps: Sequence[int]) -> str:
    """Returns what a person needs to see the fault again."""
    listed = ",".join(map(str, steps))
    again = f"python -m tests.fuzz --seed {played.seed} --steps {listed}"
    sources = "\n".join(source_of(played.seed, step, played.sizes[step]) for step in steps)
    return (
        f"{played.fault}\n" + "\n".join(getattr(played.fault, "__notes__", [])) + "\n\n"
        f"{played.seed}: found after {len(played.steps)} steps, these {len(steps)} fail as well\n"
        f"again:  {again}\nread:   {again} --source\n\n{sources}"
    )
