"""Plays fresh seeds for a given time, kills kernels between them, and reports what came of it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import count

from tests.fuzz import kills
from tests.fuzz.figures import Figures
from tests.fuzz.grammar import KINDS, Fault, Seed
from tests.fuzz.play import Played, play
from tests.fuzz.shorten import report, shorten

STEPS = 200
"""Of one session, so that what leaks a little a step is seen."""
KILLS = 50


def soak(minutes: float, number: int, tell: Callable[[str], object]) -> int:
    """Plays for so long; returns how many faults there were.

    Args:
        minutes: how long; a session that has begun is ended early.
        number: of the first session's seed; the next ones follow.
        tell: takes a line.
    """
    started = time.monotonic()
    rng, names, ends = random.Random(number), Counter[str](), Counter[str]()
    sessions: list[Played] = []
    killed, faults = 0, 0

    def left() -> float:
        return started + 60 * minutes - time.monotonic()

    for session in count():
        # Kills are spread over the time, and all of them are done.
        wanted = KILLS if left() <= 0 else int(KILLS * (1 - left() / (60 * minutes)))
        while killed < wanted:
            faults += _kill(f"{number}/{killed}", kills.PHASES[killed % len(kills.PHASES)], tell)
            killed += 1
        if left() <= 0:
            break
        seed = Seed(KINDS[session % 2], rng.choice((2, 3, 4)), number + session, soak=True)
        tell(f"{seed}: {left() / 60:.1f} min left")
        played = play(seed, range(STEPS), go_on=lambda: left() > 0)
        sessions.append(played)
        names += played.names
        ends += played.ends
        tell(_summary(played))
        if played.fault is not None:
            faults += 1
            # Before it is played again, which takes minutes and may not find it.
            tell(f"in step {played.steps[-1]}: {played.fault}")
            tell(report(played, shorten(played)))
    steps = sum(len(played.steps) for played in sessions)
    restarts = sum(played.starts - 1 for played in sessions if played.starts)
    tell(
        f"\n{steps} steps of {len(names)} kinds in {len(sessions)} sessions, {restarts} restarts, "
        f"{killed} kernels killed, in {(time.monotonic() - started) / 60:.0f} min: {faults} faults"
    )
    tell("cells ended: " + ", ".join(f"{how} {n}" for how, n in ends.most_common()))
    return faults


def _kill(seed: str, phase: str, tell: Callable[[str], object]) -> int:
    try:
        kills.kill(seed, phase)
    except Fault as fault:
        tell(str(fault))
        return 1
    return 0


def _summary(played: Played) -> str:
    return (
        f"  {len(played.steps)} steps, ranks started {played.starts} times, "
        f"{'ok' if played.fault is None else played.fault.kind}\n"
        f"  before: {_text(played.before)}\n  after:  {_text(played.after)}"
    )


def _text(figures: Figures | None) -> str:
    return str(figures) if figures is not None else "-"
