"""What the line below a cell costs: steps and allreduces with its looks and without, in turns.

    ALLRANKS_TEST_TORCH=/path/to/python python -m benchmarks.verdict

A step of Keras (`fit`) is measured, one of torch's DistributedDataParallel where that variable
names a Python with torch, and allreduces by size. Both sides run in the same processes, so a figure
is the median of ratios.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from typing import Any

import allranks
from benchmarks import results

RANKS = 2
PYTHON, INSIDE = "ALLRANKS_TEST_TORCH", "ALLRANKS_BENCHMARK_INSIDE"
#: Turns differ by several percent: 100 of steps leave an error of 1 %.
PAIRS = 400
SIZES = [4, 4096, 65_536, 1 << 20, 4 << 20, 64 << 20]
_IN_TURNS = """
import gc, time
from allranks.collectives import world as worlds
from allranks.collectives.calls.numbers import InputNumbers
from allranks.features.verdict import rank as verdicts
from allranks.features.verdict.weights import Weights

# The one of this rank.
(feature,) = [one for one in gc.get_objects() if type(one) is verdicts.RankVerdict]

# Of one cell: its first calls and steps have more of them.
numbers, followed = InputNumbers(), Weights()

def set_looks(on):
    # As the feature does for each cell; the looks at lines go on in another thread.
    worlds.current().numbers = numbers if on else None
    feature._weights = followed if on else None
    feature._looks_at_lines = on

def in_turns(stretch, pairs):
    took = [[], []]
    for turn in range(pairs):
        for on in (turn % 2, 1 - turn % 2):
            set_looks(on)
            barrier()
            began = time.perf_counter()
            stretch()
            barrier()
            took[on].append(time.perf_counter() - began)
    set_looks(True)
    return took
"""
_ALLREDUCE = """
import numpy as np
{in_turns}
took = dict()
for nbytes in {sizes}:
    array = np.random.default_rng(rank).random(max(1, nbytes // 4), "f4")
    calls = max(1, min(100, (8 << 20) // nbytes))

    def stretch():
        for _ in range(calls):
            allreduce(array)

    stretch()
    took[nbytes] = [[one / calls for one in side] for side in in_turns(stretch, {pairs})]
took
"""
_KERAS = """
import keras, numpy as np
import allranks.tensorflow.keras as hvd
{in_turns}
keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
model = keras.Sequential([keras.Input((784,)), *layers])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
x, y = np.ones((640, 784), "f4"), np.ones((640, 10), "f4")

def stretch():
    model.fit(x, y, batch_size=32, verbose=0, shuffle=False)

stretch()
in_turns(stretch, {pairs})
"""
_TORCH = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
{in_turns}
dist.is_initialized() or dist.init_process_group()
torch.set_num_threads(1)
Linear, ReLU = torch.nn.Linear, torch.nn.ReLU
layers = Linear(784, 256), ReLU(), Linear(256, 256), ReLU(), Linear(256, 10)
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.Adam(model.parameters())
x = torch.ones(32, 784)

def stretch():
    for _ in range(20):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

stretch()
in_turns(stretch, {pairs})
"""


def on_ranks(*sources: str) -> list[Any]:
    # The hooks of features come with the notebook's.
    from allranks.notebook import load_features

    load_features()
    with allranks.Cluster(RANKS, show_output=False) as cluster:
        return [
            cluster.run(source.replace("{in_turns}", _IN_TURNS).replace("{pairs}", str(PAIRS)))[0]
            for source in sources
        ]


def with_torch() -> Any:
    """Returns the times of torch, from the Python that has it; None where there is none."""
    python = os.environ.get(PYTHON)
    if not python:
        return None
    done = subprocess.run(
        [python, "-m", "benchmarks.verdict"],
        env={**os.environ, INSIDE: "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    described = results.machine()
    allreduce, fit = on_ranks(_ALLREDUCE.replace("{sizes}", str(SIZES)), _KERAS)
    samples = {"a step of Keras' fit (20 in a turn)": fit}
    torch = with_torch()
    if torch is not None:
        samples["a step of DistributedDataParallel (20 in a turn)"] = torch
    samples |= {f"allreduce of {nbytes:,} bytes": took for nbytes, took in allreduce.items()}
    print(table(results.write("verdict", described, {"ranks": RANKS, "samples": samples})))


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, (without, looking) in result["samples"].items():
        ratios = sorted(b / a for a, b in zip(without, looking, strict=True))
        more = statistics.median(b - a for a, b in zip(without, looking, strict=True))
        rows.append(
            [
                name,
                results.middle_and_least([1e6 * one for one in without]),
                results.middle_and_least([1e6 * one for one in looking]),
                f"{100 * (statistics.median(ratios) - 1):+.1f} % ({_error(ratios)})",
                f"{1e6 * more:+.2f}",
            ]
        )
    head = ["µs", "without", "with", "ratio, median of pairs (90 % of medians)", "difference"]
    return f"{result['ranks']} ranks, median (least):\n\n" + results.markdown(head, rows)


def _error(ratios: list[float]) -> str:
    """Returns what a median of sorted ratios may be besides: 90 % of such medians are within."""
    away = math.ceil(1.645 * math.sqrt(len(ratios)) / 2)
    middle = len(ratios) // 2
    low, high = ratios[max(0, middle - away)], ratios[min(len(ratios) - 1, middle + away)]
    return f"{100 * (low - 1):+.1f} to {100 * (high - 1):+.1f}"


if __name__ == "__main__":
    if os.environ.get(INSIDE):
        print(json.dumps(on_ranks(_TORCH)[0]))
    else:
        sys.argv = sys.argv[:1]
        main()
