"""Fifty allreduces in a graph of TensorFlow 1, in a different order on every rank.

    python -m benchmarks.sessions [--sizes 2 4] [--quick]

They are compared with the same graph in which each allreduce depends on the one before, and with a
``tf.function``, which runs them in the order of its trace. All run in the same processes in turns,
with TensorFlow's default number of threads. A time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from typing import Any

from benchmarks import ranks, results
from benchmarks.training import milliseconds

MANY, ELEMENTS, TURNS, EACH = 50, 1000, 20, 5
ON_RANK = "ALLRANKS_BENCHMARK_PEER"


def graph(rank: int, chained: bool) -> ranks.Call:
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


def function() -> ranks.Call:
    import tensorflow as tf

    import allranks.tensorflow as hvd

    @tf.function  # type: ignore[untyped-decorator]
    def reduce() -> Any:
        return [hvd.allreduce(tf.random.uniform([ELEMENTS]), op=hvd.Sum) for _ in range(MANY)]

    return lambda: [out.numpy() for out in reduce()]


def on_rank(quick: bool) -> None:
    import allranks.tensorflow as hvd

    hvd.init()
    from mpi4py import MPI

    steps = {"function": function()}
    steps["unordered"], steps["chained"] = (graph(hvd.rank(), chained) for chained in (False, True))
    taken = ranks.slowest(MPI.COMM_WORLD, steps, TURNS // (4 if quick else 1), EACH)
    ranks.write(hvd.rank(), milliseconds(taken))


def measure(size: int, quick: bool) -> dict[str, Any]:
    settings = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", ON_RANK: "yes"}
    command = "-m", "benchmarks.sessions", *["--quick"] * quick
    return {"ranks": size, "ms": ranks.run(size, *command, **settings)}


def table(result: dict[str, Any]) -> str:
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions")
    options = parser.parse_args()
    if ON_RANK in os.environ:
        on_rank(options.quick)
        return
    described = results.machine()
    runs = [measure(size, options.quick) for size in options.sizes]
    print(table(results.write("sessions", described, {"runs": runs})))


if __name__ == "__main__":
    main()
