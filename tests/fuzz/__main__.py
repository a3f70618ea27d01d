"""Plays steps again, or fresh ones for hours.

python -m tests.fuzz --seed notebook-4-17 --steps 3,8
python -m tests.fuzz --minutes 60
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz import play
from tests.fuzz.grammar import Seed
from tests.fuzz.ranks import numbers
from tests.fuzz.soak import soak


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
        return min(1, soak(options.minutes, number, _tell))
    if options.seed is None:
        parser.error("expected --seed or --minutes")
    if options.source:
        for step in options.steps:
            print(play.source_of(options.seed, step, options.seed.size))
        return 0
    played = play.play(options.seed, options.steps, tell=_tell)
    if played.fault is not None:
        print(f"in step {played.steps[-1]}: {played.fault}")
    return int(played.fault is not None)


def _tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
