"""Fifty allreduces in a graph of TensorFlow 1, in a different order on every rank.

    python benchmarks/sessions.py [--sizes 2 4] [--quick]

They are compared with the same graph in which each allreduce depends on the one before, and with a
``tf.function``, which runs them in the order of its trace. All run in the same processes in turns,
with TensorFlow's default number of threads. A time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MANY, ELEMENTS, TURNS, EACH = 50, 1000, 20, 5
ON_RANK = "ALLRANKS_BENCHMARK_PEER"
Step = Callable[[], object]


def graph(rank: int, chained: bool) -> Step:
    """Returns a function that fetches all results from a session."""
    import tensorflow as tf

    import allranks.tensorflow as hvd

    v1 = tf.compat.v1
    order = list(range(MANY))
    if not chained:
        random.Random(rank).shuffle(order)
    with tf.Graph().as_default() as made:
        outs: list[Any] = []
        for number in order:
            with tf.control_dependencies(outs[-1:] if chained else []):
                x = v1.random.uniform([ELEMENTS])
                outs.append(hvd.allreduce(x, op=hvd.Sum, name=f"sum_{number}"))
        session = v1.Session(graph=made)
    return lambda: session.run(outs)


def function() -> Step:
    """Returns a compiled function of all allreduces."""
    import tensorflow as tf

    import allranks.tensorflow as hvd

    @tf.function  # type: ignore[untyped-decorator]
    def reduce() -> Any:
        return [hvd.allreduce(tf.random.uniform([ELEMENTS]), op=hvd.Sum) for _ in range(MANY)]

    return lambda: [out.numpy() for out in reduce()]


def on_rank(quick: bool) -> None:
    """Runs the measurement on a rank."""
    import numpy as np

    import allranks.tensorflow as hvd
    from benchmarks.training import in_turns, told

    hvd.init()
    from mpi4py import MPI

    steps = {"function": function()}
    steps["unordered"], steps["chained"] = (graph(hvd.rank(), chained) for chained in (False, True))
    taken = in_turns(steps, TURNS // (4 if quick else 1), EACH, MPI.COMM_WORLD.Barrier)
    slowest = {}
    for name, times in taken.items():
        mine, worst = np.array(times), np.empty(len(times))
        MPI.COMM_WORLD.Allreduce(mine, worst, MPI.MAX)
        slowest[name] = worst.tolist()
    told(hvd.rank(), slowest)


def measure(ranks: int, quick: bool) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "tests" / "mpi"))
    from launch import environment

    from benchmarks.training import read

    program = Path(sys.executable).parent / "mpiexec"
    done = subprocess.run(
        [str(program), "-n", str(ranks), sys.executable, __file__, *["--quick"] * quick],
        env=environment(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="", **{ON_RANK: "yes"}),
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return {"ranks": ranks, "ms": read(done.stdout)}


def table(result: dict[str, Any]) -> str:
    """Returns the figures in Markdown."""
    from benchmarks import results

    rows = []
    for run in result["runs"]:
        unordered, chained, traced = (
            statistics.median(run["ms"][name]) for name in ("unordered", "chained", "function")
        )
        rows.append(
            [f"n={run['ranks']}", f"{unordered:.1f}"]
            + [f"{other:.1f} ({unordered / other:.2f}×)" for other in (chained, traced)]
        )
    head = [f"{MANY} allreduces", "in any order ms", "one after the other ms", "tf.function ms"]
    return results.markdown(head, rows)


def main() -> None:
    """Measures, writes ``results/sessions.json`` and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions")
    options = parser.parse_args()
    if ON_RANK in os.environ:
        on_rank(options.quick)
        return
    from benchmarks import machine, results

    described = machine.describe()
    runs = [measure(ranks, options.quick) for ranks in options.sizes]
    print(table(results.write("sessions", described, {"runs": runs})))


if __name__ == "__main__":
    main()
