"""Compares keep() with pickle.dump on every rank: python -m benchmarks.keeping [--quick]

Two ranks keep an array of a quarter of a gigabyte each, in both ways in turns. Then a small
training loop runs with and without one keep() of its model, in turns. The added time, divided by a
minute, is the slowdown at one commit a minute. Every time is the slowest rank's.

Prints a table in Markdown and writes benchmarks/results/keeping.json.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import results

RANKS, NBYTES, STEPS = 2, 1 << 28, 400
SETUP = """
import os, pickle, tempfile
from time import perf_counter
import numpy as np
from allranks.collectives import world
series = world.current().variable_store.of_cells
big = np.ones({nbytes} // 8)
batch = np.random.default_rng(rank).normal(size=(256, 256))
model = dict(weights=np.zeros((256, 256)), momentum=np.zeros((256, 256)))

def taken(do):
    barrier()
    began = perf_counter()
    do()
    return float(allreduce(np.array(perf_counter() - began), Max))

def dumps():
    with tempfile.NamedTemporaryFile() as file:
        pickle.dump(big, file, protocol=5)
        file.flush()
        barrier()

def writes():
    keep(big=big)
    series.settle()
    barrier()

def trains(kept):
    for step in range({steps}):
        gradient = batch.T @ (batch @ model["weights"] - batch) / 256
        model["momentum"] = 0.9 * model["momentum"] + allreduce(gradient)
        model["weights"] -= 0.01 * model["momentum"]
        if kept and step == {steps} // 2:
            keep(model=model)
    series.settle()
"""
SAMPLE = """
[taken(dumps), taken(lambda: keep(big=big)), (series.settle(), taken(writes))[1],
 taken(lambda: trains(False)), taken(lambda: trains(True))]
"""
HEAD = ("", "pickle.dump", "keep()", "times faster")


def measure(repeats: int, nbytes: int, steps: int) -> list[list[float]]:
    import allranks

    with allranks.Cluster(RANKS, gpus="none") as cluster:
        cluster.run(SETUP.format(nbytes=nbytes, steps=steps))
        return [cluster.run(SAMPLE)[0] for _ in range(repeats + 1)][1:]


def table(result: dict[str, Any]) -> str:
    dumped, held, written, plain, kept = zip(*result["samples"], strict=True)
    gigabytes = result["nbytes"] / 1e9
    per_gb = [[each / gigabytes for each in times] for times in (dumped, held, written)]
    shown = [results.middle_and_least(times, 2) for times in per_gb]
    faster = results.times_faster
    rows = [
        ("seconds per GB until the loop continues", shown[0], shown[1], faster(dumped, held)),
        ("seconds per GB until the data is written", shown[0], shown[2], faster(dumped, written)),
    ]
    added = min(kept) - min(plain)  # other load only adds time
    return (
        f"`keep()` of {gigabytes:.2f} GB on each of {RANKS} ranks, compared with `pickle.dump` to "
        f"a file: median (minimum) of {len(dumped)}.\n\n"
        + results.markdown(HEAD, rows)
        + f"\n\nWith one keep(), a training loop of {result['steps']} steps takes "
        f"{min(kept) / min(plain):.3f} times as long. At one keep() per minute it is "
        f"{100 * max(added, 0) / 60:.3f} % slower."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keeping", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions, small arrays")
    quick = parser.parse_args().quick
    nbytes, steps = (NBYTES // 4, STEPS // 4) if quick else (NBYTES, STEPS)
    described = results.machine()
    samples = measure(3 if quick else 9, nbytes, steps)
    measured = {"samples": samples, "nbytes": nbytes, "steps": steps}
    print(table(results.write("keeping", described, measured)))


if __name__ == "__main__":
    main()
