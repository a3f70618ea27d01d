"""Measures the network "here": messages, allreduces and computing of real ranks.

A time is that of a step in a loop of steps, as programs make them: a single step after a barrier
takes longer or shorter, because the ranks do not leave the barrier at the same time. How ranks wait
and share cores is in all times, so they are measured for each number of ranks.

The function that is sent to the ranks imports what it needs there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NBYTES = (8, 2048, 6144, *(1024 * 3 * 2**power for power in range(3, 14)))
"""To 24 MB. Programs rarely send these sizes: predictions of other sizes can be checked."""
PRODUCTS = (1, 4, 16, 64)
"""Lengths of computing, in products of small matrices: 0.4 ms to 25 ms on a usual core."""
LARGEST_OBJECT = 2 << 20
"""Larger objects take very long."""
_PASSES, _LOOP_SECONDS = 7, 0.01

Curve = list[list[float]]
"""Pairs of a number of bytes, or of seconds of computing, and what was measured for it."""
Key = tuple[str, int]


def measure(
    nbytes: Sequence[int], products: Sequence[int], passes: int, loop_seconds: float
) -> dict[Key, list[float]]:
    """Returns all times of this rank; all ranks call it.

    Returns:
        Seconds of a step, one for each pass, by kind and by bytes or products: ``inside`` are
        messages in a ring of each host's ranks, ``between`` those of one rank of each of the first
        two hosts, and ``objects`` the same as pickled objects. A step of ``compute`` ends with a
        barrier; ``alone`` is CPU time of rank 0 while the others wait.
    """
    import time
    from functools import partial

    import numpy as np

    from allranks import collectives

    comm, rank = collectives.comm, collectives.rank()
    hosts = comm.allgather(collectives.cross_rank())
    here = [other for other, one in enumerate(hosts) if one == hosts[rank]]
    there = [hosts.index(one) for one in sorted(set(hosts))[:2]]
    found: dict[Key, list[float]] = {}
    steps: dict[Key, int] = {}
    x = np.random.default_rng(0).random((160, 160))

    def compute(count: int) -> None:
        for _ in range(count):
            x.T @ np.tanh(x @ x)

    def compute_and_meet(count: int) -> None:
        compute(count)
        collectives.barrier()

    def loop(step: Any, count: int) -> float:
        collectives.barrier()
        began = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - began) / count

    def keep(kind: str, size: int, step: Any) -> None:
        key = kind, size
        if key in steps:
            found.setdefault(key, []).append(loop(step, steps[key]))
            return
        # The first pass warms up, and all ranks agree on the number of steps.
        count = 2
        while count < 300 and max(comm.allgather(loop(step, count))) * count < loop_seconds:
            count *= 3
        steps[key] = count

    def keep_messages(kind: str, ranks: list[int], size: int) -> None:
        data, received, text = np.zeros(size, np.uint8), np.zeros(size, np.uint8), bytes(size)
        moves = rank in ranks and len(ranks) > 1
        at = ranks.index(rank) if moves else 0
        left, right = ranks[at - 1], ranks[(at + 1) % len(ranks)]

        def send() -> None:
            if moves:
                comm.Sendrecv(data, right, 0, received, left, 0)

        def send_object() -> None:
            if moves:
                comm.sendrecv(text, right, 0, None, left, 0)

        keep(kind, size, send)
        if size <= LARGEST_OBJECT:
            keep(f"{kind} objects", size, send_object)

    for _ in range(passes + 1):
        for size in nbytes:
            keep_messages("inside", here, size)
            if len(there) > 1:
                keep_messages("between", there, size)
            values = np.zeros(size // 8)
            keep("allreduce", size, partial(collectives.allreduce, values, collectives.Sum))
        keep("barrier", 0, collectives.barrier)
        for count in products:
            keep("compute", count, partial(compute_and_meet, count))
        if rank == 0:
            began = time.thread_time()
            compute(products[-1])
            found.setdefault(("alone", 0), []).append((time.thread_time() - began) / products[-1])
        collectives.barrier()
    found["hosts", 0] = list(map(float, hosts))
    return found


def summary(ranks: Sequence[Mapping[Key, list[float]]]) -> dict[str, Any]:
    """Returns the curves of ranks that have run `measure`, and their hosts."""
    hosts = [int(one) for one in ranks[0]["hosts", 0]]
    alone = float(np.median(ranks[0]["alone", 0]))
    times = {
        key: float(np.median(np.max([one[key] for one in ranks], axis=0)))
        for key in ranks[0]
        if key[0] not in ("alone", "hosts")
    }
    curves: dict[str, Curve] = {}
    for (kind, size), seconds in sorted(times.items()):
        if kind not in ("barrier", "compute"):
            curves.setdefault(kind, []).append([float(size), seconds])
    slowdown = [
        [count * alone, max(1.0, (times["compute", count] - times["barrier", 0]) / (count * alone))]
        for count in PRODUCTS
    ]
    return {
        "curves": {kind: _rising(curve) for kind, curve in curves.items()},
        "slowdown": slowdown,
        "computing": hosts.count(hosts[0]),
        "ranks_each": hosts.count(hosts[0]) if len(set(hosts)) > 1 else 0,
    }


def _rising(curve: Curve) -> Curve:
    # More bytes never take less time: a lower time of more bytes is the better measurement.
    for at in range(len(curve) - 2, -1, -1):
        curve[at][1] = min(curve[at][1], curve[at + 1][1])
    return curve


def here(launcher: str | None = None) -> dict[int, dict[str, Any]]:
    """Measures real ranks, which start and end; returns a `summary` for each number of them."""
    from allranks.cluster.cluster import Cluster

    found: dict[int, dict[str, Any]] = {}
    for size in [None] if launcher else _sizes():
        with Cluster(size, gpus="none", launcher=launcher or "local", show_output=False) as ranks:
            times = ranks.run(measure, NBYTES, PRODUCTS, _PASSES, _LOOP_SECONDS)
            found[ranks.size] = summary(times)
    return found


def _sizes() -> list[int]:
    """Numbers of ranks around the number of cores, where their times change."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    return sorted({2, *(max(2, min(16, one)) for one in (cores, cores + 1, 2 * cores))})


def at_size(found: Mapping[int, Mapping[str, Any]], size: int) -> dict[str, Any]:
    """The measured figures for a number of ranks: on a line between the nearest numbers."""
    known = sorted(found)
    upper = min(max(1, sum(one < size for one in known)), len(known) - 1)
    low, high = known[upper - 1], known[upper]
    share = max(0.0, (size - low) / (high - low)) if low < high else 0.0

    def between(a: Curve, b: Curve) -> Curve:
        return [[x, max(y, y + share * (z - y))] for (x, y), (_, z) in zip(a, b, strict=True)]

    curves = found[low]["curves"]
    return {
        "curves": {kind: between(curves[kind], found[high]["curves"][kind]) for kind in curves},
        "slowdowns": [[found[one]["computing"], found[one]["slowdown"]] for one in known],
        "ranks_each": found[low]["ranks_each"],
    }
