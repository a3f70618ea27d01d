"""Measures the network "here": messages and allreduces of real ranks on this machine.

The functions that are sent to the ranks import what they need there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

PING_NBYTES = (8, 65_536, 1 << 20)
ALLREDUCE_NBYTES = (4096, 262_144, 4 << 20)
_REPEATS = 30


def measure_messages() -> list[tuple[int, float]]:
    """Returns for each size the shortest time of a message there and back, halved; on two ranks."""
    from time import perf_counter

    from allranks import collectives

    comm, rank, found = collectives.comm, collectives.rank(), []
    for nbytes in PING_NBYTES:
        data, best = np.zeros(nbytes, np.uint8), float("inf")
        for _ in range(_REPEATS):
            collectives.barrier()
            began = perf_counter()
            if rank == 0:
                comm.Send(data, 1)
                comm.Recv(data, 1)
            elif rank == 1:
                comm.Recv(data, 0)
                comm.Send(data, 0)
            best = min(best, (perf_counter() - began) / 2)
        found.append((nbytes, best))
    return found


def measure_allreduces() -> list[tuple[int, float]]:
    """Returns for each size the shortest time of an allreduce, on the slowest rank."""
    from time import perf_counter

    from allranks import collectives

    found = []
    for nbytes in ALLREDUCE_NBYTES:
        data, times = np.zeros(nbytes // 8), []
        for _ in range(_REPEATS):
            collectives.barrier()
            began = perf_counter()
            collectives.allreduce(data, collectives.Sum)
            times.append(perf_counter() - began)
        slowest = collectives.allreduce(np.array(times), collectives.Max)
        found.append((nbytes, float(slowest.min())))
    return found


def link(pings: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The latency and the bandwidth that fit the times of messages."""
    (_, latency), *_, (nbytes, seconds) = pings
    return latency, nbytes / max(seconds - latency, 1e-9)


def collective_terms(times: Sequence[tuple[int, int, float]]) -> tuple[float, ...]:
    """The terms of an allreduce of S bytes on n ranks that fit its times: ``1, n, S, n S``.

    The relative errors are least, and no term is negative.
    """
    rows = np.array([[1.0, n, nbytes, n * nbytes] for n, nbytes, _ in times])
    measured = np.array([seconds for *_, seconds in times])
    chosen = list(range(4))
    while True:
        weighted = rows[:, chosen] / measured[:, None]
        found, *_ = np.linalg.lstsq(weighted, np.ones(len(measured)), rcond=None)
        if (found >= 0).all():
            break
        chosen.pop(int(np.argmin(found)))
    terms = np.zeros(4)
    terms[chosen] = found
    return tuple(map(float, terms))


def here() -> dict[str, Any]:
    """Measures on real ranks, which start and end; returns what a `Network` is made of."""
    from allranks.cluster.cluster import Cluster

    times: list[tuple[int, int, float]] = []
    pings: list[tuple[int, float]] = []
    for size in (2, 4):
        with Cluster(size, gpus="none", launcher="local", show_output=False) as ranks:
            if size == 2:
                pings = ranks.run(measure_messages)[0]
            times += [(size, *one) for one in ranks.run(measure_allreduces)[0]]
    latency, bandwidth = link(pings)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "latency": latency,
        "bandwidth": bandwidth,
        "terms": collective_terms(times),
        "cores": cores or 1,
    }
