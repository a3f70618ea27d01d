"""Measurements on ranks under mpiexec: calls in turns, and their times for the first process.

Other load on the machine affects all sides, because they run in turns within each repetition.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], object]
# The first repetitions are not counted, because they run with cold caches.
_WARM_UP = 2


def in_turns(
    calls: Mapping[str, Call], repeats: int, each: int, wait: Call
) -> dict[str, list[float]]:
    """Returns the seconds per call of each side on this rank, one figure per repetition.

    ``each`` calls run in a row: the first call after another side's call has cold caches, which is
    not typical of training. ``wait`` is a barrier.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_WARM_UP + repeats):
        for name, call in calls.items():
            wait()
            began = time.perf_counter()
            for _ in range(each):
                call()
            if turn >= _WARM_UP:
                taken[name].append((time.perf_counter() - began) / each)
    return taken


def slowest(
    comm: Any, calls: Mapping[str, Call], repeats: int, each: int = 1
) -> dict[str, list[float]]:
    """Returns the seconds per call of each side on the slowest rank of each repetition."""
    import numpy as np
    from mpi4py import MPI

    found = {}
    for name, times in in_turns(calls, repeats, each, comm.Barrier).items():
        worst = np.empty(len(times))
        comm.Allreduce(np.array(times), worst, MPI.MAX)
        found[name] = worst.tolist()
    return found


def write(rank: int, found: Any) -> None:
    # For `read`: the marker separates the result from other output of the ranks.
    if rank == 0:
        sys.stdout.write("\n@" + json.dumps(found) + "\n")
        sys.stdout.flush()


def read(output: str) -> Any:
    """Returns the result in the output of the ranks."""
    line = next(line for line in output.splitlines() if line.startswith("@"))
    return json.loads(line[1:])


def run(ranks: int, *arguments: str, **settings: str) -> Any:
    """Runs ``python *arguments`` under mpiexec, and returns the result that `write` printed."""
    from tests.mpi.launch import mpiexec

    done = mpiexec(ranks, *arguments, timeout=900, **settings)
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks have failed:\n{done.stdout}")
    return read(done.stdout)
