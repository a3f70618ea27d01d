"""The cost of a profile: short parts of a cell with and without it."""

from __future__ import annotations

import statistics
from typing import Any

import allranks
from benchmarks import results

RANKS = 2
PAIRS = 60
_CELLS = {
    "a loop in Python": """
for i in range(3_000_000):
    total = i % 7
""",
    "numpy and an allreduce, in turns": """
for i in range(300):
    gradient = (weights @ weights).ravel()[:25_000]
    allreduce(gradient, name="gradients")
""",
}
# The parts run in turns, so other load affects both.
_MEASURE = """
import time
import numpy as np
from allranks.features.profile.rank import Sampler

weights = np.ones((256, 256), np.float32)
sampler = Sampler((lambda: None).__code__)

def stretch():
    {cell}

def timed(profiled):
    if profiled:
        sampler.begin_cell()
        sampler.start(0.0)
    barrier()
    began = time.perf_counter()
    stretch()
    barrier()
    took = time.perf_counter() - began
    sampler.end_cell()
    return took

took = [[], []]
for turn in range({pairs}):
    for profiled in (turn % 2, 1 - turn % 2):
        took[profiled].append(timed(profiled))
took
"""


def main() -> None:
    described = results.machine()
    samples = {}
    with allranks.Cluster(RANKS) as cluster:
        for name, cell in _CELLS.items():
            source = _MEASURE.format(cell=cell.replace("\n", "\n    "), pairs=PAIRS)
            samples[name] = dict(zip(("without", "with"), cluster.run(source)[0], strict=True))
    print(table(results.write("profile", described, {"ranks": RANKS, "samples": samples})))


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, sides in result["samples"].items():
        without, profiled = sides["without"], sides["with"]
        ratios = [b / a for a, b in zip(without, profiled, strict=True)]
        quiet = [sorted(side)[: max(1, len(side) // 4)] for side in (without, profiled)]
        least = statistics.median(quiet[1]) / statistics.median(quiet[0])
        rows.append(
            [
                name,
                results.middle_and_least([1000 * s for s in without]),
                results.middle_and_least([1000 * s for s in profiled]),
                f"{100 * (statistics.median(ratios) - 1):+.1f} %",
                f"{100 * (least - 1):+.1f} %",
            ]
        )
    head = ["ms", "without", "profiled", "more, median of pairs", "more, quietest quarter"]
    return f"{result['ranks']} ranks, median (least):\n\n" + results.markdown(head, rows)
