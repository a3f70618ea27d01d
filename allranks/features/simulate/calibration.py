"""Measures the network "here": messages, allreduces and computing of real ranks.

The functions that are sent to the ranks import what they need there.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NBYTES = (8, 1024, 4096, 16_384, 131_072, 524_288, 2 << 20, 8 << 20)
STEPS = (1, 5)
"""A time after a barrier has a part that comes once: the ranks do not leave it at the same time."""
_REPEATS, _LONG_REPEATS = 25, 8
_LONG_NBYTES = 2 << 20

Curve = list[list[float]]
"""Pairs of a number of bytes and seconds."""


def measure(nbytes: Sequence[int], steps: Sequence[int], repeats: Sequence[int]) -> dict[Any, Any]:
    """Returns all times of this rank; all ranks call it.

    Returns:
        Lists of seconds by kind, number of bytes and number of steps: ``inside`` are messages in a
        ring of each host's ranks, ``between`` those of one rank of each of the first two hosts.
    """
    import time

    import numpy as np

    from allranks import collectives

    comm, rank, host = collectives.comm, collectives.rank(), collectives.cross_rank()
    hosts = comm.allgather(host)
    here = [other for other, one in enumerate(hosts) if one == host]
    there = [hosts.index(one) for one in sorted(set(hosts))[:2]]
    found: dict[Any, list[float]] = {}

    def neighbours(ranks: list[int]) -> tuple[int, int] | None:
        if rank not in ranks or len(ranks) == 1:
            return None
        at = ranks.index(rank)
        return ranks[at - 1], ranks[(at + 1) % len(ranks)]

    for repeat in range(repeats[0]):
        for size in nbytes:
            if repeat >= repeats[1] and size >= repeats[2]:
                continue
            data, received = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
            values = np.zeros(max(1, size // 8))
            for kind in ("inside", "between", "allreduce"):
                pair = neighbours(here if kind == "inside" else there)
                for count in steps:
                    collectives.barrier()
                    began = time.perf_counter()
                    for _ in range(count):
                        if kind == "allreduce":
                            collectives.allreduce(values, collectives.Sum)
                        elif pair is not None:
                            left, right = pair
                            comm.Sendrecv(data, right, 0, received, left, 0)
                    found.setdefault((kind, size, count), []).append(time.perf_counter() - began)
    x = np.random.default_rng(0).random((320, 320))
    for alone in (True, False):
        # The others sleep meanwhile, as ranks that wait poll.
        collectives.barrier()
        if alone and rank:
            time.sleep(0.3)
            continue
        for _ in range(repeats[0]):
            if not alone:
                collectives.barrier()
            began, cpu = time.perf_counter(), time.thread_time()
            x.T @ np.tanh(x @ x)
            found.setdefault(("compute", 0, 0), [])
            found.setdefault(("alone", 0, 0), [])
            if alone:
                found["alone", 0, 0].append(time.thread_time() - cpu)
            else:
                found["compute", 0, 0].append(time.perf_counter() - began)
    collectives.barrier()
    found["hosts", 0, 0] = list(map(float, hosts))
    return found


def typical(times: Sequence[Sequence[float]]) -> float:
    """The lowest quintile of the slowest rank's times: other programs only add time."""
    return float(np.quantile(np.max(times, axis=0), 0.2))


def summary(ranks: Sequence[Mapping[Any, list[float]]]) -> dict[str, Any]:
    """Returns the curves of ranks that have run `measure`, what comes once, and the hosts."""
    few, many = STEPS
    times: dict[Any, float] = {}
    for key in ranks[0]:
        if key[0] in ("inside", "between", "allreduce"):
            times[key] = typical([one[key] for one in ranks])
    curves: dict[str, Curve] = {}
    for kind in ("inside", "between", "allreduce"):
        curves[kind] = _rising(
            [
                [float(size), max(1e-7, (times[kind, size, many] - once) / (many - few))]
                for size in NBYTES
                for once in [times[kind, size, few]]
            ]
        )
    first = NBYTES[:3]
    skew = float(
        np.median([times["allreduce", size, few] - curves["allreduce"][at][1]
                   for at, size in enumerate(first)])
    )  # fmt: skip
    hosts = [int(one) for one in ranks[0]["hosts", 0, 0]]
    alone = float(np.quantile(ranks[0]["alone", 0, 0], 0.2))
    slowdown = typical([one["compute", 0, 0] for one in ranks]) / alone
    return {
        **curves,
        "skew": max(0.0, skew),
        "slowdown": max(1.0, slowdown),
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
            times = ranks.run(measure, NBYTES, STEPS, (_REPEATS, _LONG_REPEATS, _LONG_NBYTES))
            found[ranks.size] = summary(times)
    return found


def _sizes() -> list[int]:
    """Numbers of ranks around the number of cores, where their times change."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    return sorted({2, *(max(2, min(16, one)) for one in (cores, cores + 1, 2 * cores))})


def at_size(found: Mapping[int, Mapping[str, Any]], size: int) -> dict[str, Any]:
    """The measured figures for so many ranks: on a line between the nearest numbers of ranks."""
    known = sorted(found)
    if len(known) == 1 or size <= known[0]:
        return dict(found[known[0]])
    upper = next((at for at, one in enumerate(known) if one >= size), len(known) - 1)
    upper = max(1, upper)
    low, high = known[upper - 1], known[upper]
    share = (size - low) / (high - low)

    def between(a: Any, b: Any) -> Any:
        if isinstance(a, list):
            return [[x, max(y, y + share * (z - y))] for (x, y), (_, z) in zip(a, b, strict=True)]
        return a + share * (b - a) if isinstance(a, float) else a

    figures: dict[str, Any] = defaultdict(float)
    for name, value in found[low].items():
        figures[name] = between(value, found[high][name])
    return dict(figures)
