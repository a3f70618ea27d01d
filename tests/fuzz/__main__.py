"""Plays steps again, or fresh ones for hours.

python -m tests.fuzz --seed notebook-4-17 --steps 3,8
python -m tests.fuzz --minutes 60
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from itertools import count

from tests.fuzz import kills
from tests.fuzz.grammar import KINDS, Fault, Seed
from tests.fuzz.play import Played, play, report, shorten, source_of
from tests.fuzz.ranks import numbers

STEPS = 200
"""Of one session, so that what leaks a little a step is seen."""
KILLS = 50


def soak(minutes: float, number: int) -> int:
    """Plays fresh seeds, from a number on, and kills kernels between them; returns how many faults.

    A session that has begun is ended early.
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
            try:
                kills.kill(f"{number}/{killed}", kills.PHASES[killed % len(kills.PHASES)])
            except Fault as fault:
                _tell(str(fault))
                faults += 1
            killed += 1
        if left() <= 0:
            break
        seed = Seed(KINDS[session % len(KINDS)], rng.choice((2, 3, 4)), number + session, soak=True)
        _tell(f"{seed}: {left() / 60:.1f} min left")
        played = play(seed, range(STEPS), go_on=lambda: left() > 0)
        sessions.append(played)
        names += played.names
        ends += played.ends
        _tell(
            f"  {len(played.steps)} steps, ranks started {played.starts} times, "
            f"{'ok' if played.fault is None else played.fault.kind}\n"
            f"  before: {played.before}\n  after:  {played.after}"
        )
        if played.fault is not None:
            faults += 1
            # Before it is played again, which takes minutes and may not find it.
            _tell(f"in step {played.steps[-1]}: {played.fault}")
            _tell(report(played, shorten(played)))
    steps = sum(len(played.steps) for played in sessions)
    restarts = sum(played.starts - 1 for played in sessions if played.starts)
    _tell(
        f"\n{steps} steps of {len(names)} kinds in {len(sessions)} sessions, {restarts} restarts, "
        f"{killed} kernels killed, in {(time.monotonic() - started) / 60:.0f} min: {faults} faults"
    )
    _tell("cells ended: " + ", ".join(f"{how} {n}" for how, n in ends.most_common()))
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=Seed.parse, help="as notebook-4-17 or cluster-2-3")
    parser.add_argument("--steps", default="0-49", type=numbers, help="as 3,8 or 0-49")
    parser.add_argument("--source", action="store_true", help="print the steps, and play none")
    parser.add_argument("--minutes", type=float, help="play fresh sessions for so long")
    parser.add_argument("--number", type=int, help="with --minutes: where the seeds begin")
    options = parser.parse_args()
    if options.minutes:
        number = options.number if options.number is not None else int(time.time())
        return min(1, soak(options.minutes, number))
    if options.seed is None:
        parser.error("expected --seed or --minutes")
    if options.source:
        for step in options.steps:
            print(source_of(options.seed, step, options.seed.size))
        return 0
    played = play(options.seed, options.steps, tell=_tell)
    if played.fault is not None:
        print(f"in step {played.steps[-1]}: {played.fault}")
    return int(played.fault is not None)


def _tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
