"""Measures the network "here": messages, allreduces and computing of real ranks.

A time is that of a call in a loop of calls, as programs make them: a single call after a barrier
takes longer or shorter, because the ranks do not leave the barrier at the same time. How ranks wait
and share cores is in all times, so they are measured for each number of ranks. Times differ from
start to start of the ranks, so there are several starts.

The function that is sent to the ranks imports what it needs there.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

_CHANGES = 64 << 10, 66 << 10, 1088 << 10
"""Around 64 KB an allreduce takes a second step, and above 1 MB data leaves the caches."""
NBYTES = tuple(sorted((8, 2048, 6144, *(1024 * 3 * 2**power for power in range(3, 14)), *_CHANGES)))
"""To 24 MB. Programs rarely send the others, so predictions of usual sizes can be checked."""
PRODUCTS = (1, 4, 16, 64)
"""Lengths of computing, in products of small matrices: 0.4 ms to 25 ms on a usual core."""
OBJECTS = 4096, 2 << 20
"""The send of a larger object than the first waits for its receive; those above the second take
very long."""
_STARTS, _PASSES, _LOOP_SECONDS = 3, 4, 0.01

Curve = list[list[float]]
"""Pairs of a number of bytes, or of seconds of computing, and what was measured for it."""
Key = tuple[str, int]


def measure(
    nbytes: Sequence[int],
    products: Sequence[int],
    objects: tuple[int, int],
    passes: int,
    loop_seconds: float,
) -> dict[Key, list[float]]:
    """Returns all times of this rank; all ranks call it.

    Returns:
        Seconds of a call, one for each pass, by kind and by bytes or products: ``inside`` are
        messages in a ring of each host's ranks, ``between`` those in a ring of the ranks of all
        hosts, and the same with ``objects`` as pickled objects. A step of ``compute K`` is
        computing on K ranks of each machine and a barrier of all; ``alone`` is CPU time of rank 0
        while the others wait.
    """
    import os
    import time
    from functools import partial
    from pathlib import Path

    import numpy as np

    from allranks import collectives

    comm, rank = collectives.comm, collectives.rank()
    largest_sent, largest_object = objects
    hosts = comm.allgather(collectives.cross_rank())
    rings = {"inside": [other for other, one in enumerate(hosts) if one == hosts[rank]]}
    if len(set(hosts)) > 1:
        rings["between"] = list(range(len(hosts)))
    # Hosts that are containers or namespaces of one machine share its cores.
    boot = Path("/proc/sys/kernel/random/boot_id")
    machines = comm.allgather(boot.read_text() if boot.exists() else hosts[rank])
    place, together = machines[:rank].count(machines[rank]), machines.count(machines[0])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else together
    # On one host, other numbers of ranks are measured on their own.
    numbers = {together} if len(rings) == 1 else {together, min(together, cores)}
    numbers = comm.bcast(sorted(numbers))
    found: dict[Key, list[float]] = {}
    counts: dict[Key, int] = {}
    x = np.random.default_rng(0).random((160, 160))
    # Arrays of each size, as in programs: a part of a large array is in huge pages, whose messages
    # take half the time. Written before: the first use of memory takes longer than sending it.
    arrays = {size: (np.ones(size, np.uint8), np.ones(size, np.uint8)) for size in nbytes}

    def compute(count: int) -> None:
        for _ in range(count):
            x.T @ np.tanh(x @ x)

    def compute_and_meet(number: int, count: int) -> None:
        if place < number:
            compute(count)
        collectives.barrier()

    def loop(call: Any, count: int) -> float:
        collectives.barrier()
        seconds = 0.0
        for _ in range(count):
            began = time.perf_counter()
            result = call()
            seconds += time.perf_counter() - began
            del result  # the program frees it, which is not a part of the call
        return seconds / count

    def keep(kind: str, size: int, call: Any) -> None:
        key = kind, size
        if key in counts:
            found.setdefault(key, []).append(loop(call, counts[key]))
            return
        # The first pass warms up, and all ranks agree on the number of calls.
        count = 2
        while count < 300 and max(comm.allgather(loop(call, count))) * count < loop_seconds:
            count *= 3
        counts[key] = count

    def keep_messages(kind: str, ranks: list[int], size: int) -> None:
        (data, buffer), text = arrays[size], bytes(size)
        at, moves = ranks.index(rank), len(ranks) > 1
        left, right = ranks[at - 1], ranks[(at + 1) % len(ranks)]

        def send() -> None:
            if moves:
                comm.Sendrecv(data, right, 0, buffer, left, 0)

        def send_object() -> None:
            if moves and size <= largest_sent:
                comm.send(text, right)
                comm.recv(source=left)
            elif moves:
                comm.sendrecv(text, right, 0, None, left, 0)

        keep(kind, size, send)
        if size <= largest_object:
            keep(f"{kind} objects", size, send_object)

    for _ in range(passes + 1):
        for size in nbytes:
            for kind, ranks in rings.items():
                keep_messages(kind, ranks, size)
            values = arrays[size][0].view(float)
            keep("allreduce", size, partial(collectives.allreduce, values, collectives.Sum))
        keep("barrier", 0, collectives.barrier)
        for number in numbers:
            for count in products:
                keep(f"compute {number}", count, partial(compute_and_meet, number, count))
        if rank == 0:
            began = time.thread_time()
            compute(products[-1])
            found.setdefault(("alone", 0), []).append((time.thread_time() - began) / products[-1])
        collectives.barrier()
    found["hosts", 0] = list(map(float, hosts))
    found["machines", 0] = [float(machines.index(one)) for one in machines]
    return found


def summary(starts: Sequence[Sequence[Mapping[Key, list[float]]]]) -> dict[str, Any]:
    """Returns the curves of ranks that have run `measure` after some starts, and their hosts."""
    # Here, because the start of ranks imports this module, and few programs simulate.
    import numpy as np

    hosts, machines = starts[0][0]["hosts", 0], starts[0][0]["machines", 0]
    alone = float(np.median([ranks[0]["alone", 0] for ranks in starts]))
    times = {
        key: float(np.median([np.max([one[key] for one in ranks], axis=0) for ranks in starts]))
        for key in starts[0][0]
        if key[0] not in ("alone", "hosts", "machines")
    }
    curves: dict[str, Curve] = {}
    slowdowns: dict[int, Curve] = {}
    for (kind, size), seconds in sorted(times.items()):
        if kind.startswith("compute "):
            factor = (seconds - times["barrier", 0]) / (size * alone)
            slowdown = slowdowns.setdefault(int(kind.removeprefix("compute ")), [])
            slowdown.append([size * alone, max(1.0, factor)])
        elif kind != "barrier":
            curves.setdefault(kind, []).append([float(size), seconds])
    for curve in curves.values():
        _rising(curve)
    crossing = sum(one != other for one, other in pairwise([hosts[-1], *hosts]))
    for kind in curves:
        if kind.startswith("between"):
            inside = curves[kind.replace("between", "inside")]
            _without_inside(curves[kind], inside, crossing, len(hosts))
    return {
        "curves": curves,
        "slowdowns": sorted(slowdowns.items()),
        "ranks_each": hosts.count(hosts[0]) if len(set(hosts)) > 1 else 0,
        "computing_each": machines.count(machines[0]) if len(set(machines)) > 1 else 0,
    }


def _rising(curve: Curve) -> None:
    # More bytes never take less time: a lower time of more bytes is the better measurement.
    for at in range(len(curve) - 2, -1, -1):
        curve[at][1] = min(curve[at][1], curve[at + 1][1])


def _without_inside(between: Curve, inside: Curve, crossing: int, ranks: int) -> None:
    # A small message does not wait for its receive. So a step of the ring takes the mean of all of
    # its messages, of which only some are between hosts.
    for pair, (nbytes, seconds) in zip(between, inside, strict=True):
        if nbytes <= OBJECTS[0]:
            others = (ranks - crossing) * seconds
            pair[1] = max(pair[1], (ranks * pair[1] - others) / crossing)


def here(launcher: str | None = None) -> dict[int, dict[str, Any]]:
    """Measures real ranks, which start and end; returns a `summary` for each number of them."""
    from allranks.cluster.cluster import Cluster

    function, found = _as_cell(measure), dict[int, dict[str, Any]]()
    for size in [None] if launcher else _sizes():
        starts = []
        for _ in range(_STARTS):
            with Cluster(
                size, gpus="none", launcher=launcher or "local", show_output=False
            ) as ranks:
                starts.append(
                    ranks.run(function, NBYTES, PRODUCTS, OBJECTS, _PASSES, _LOOP_SECONDS)
                )
                number = ranks.size
        found[number] = summary(starts)
    return found


def _as_cell(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as the code of a cell. Each call looks for the line of the user's code that has
    made it: that takes longer if there is only code of allranks.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(inspect.getsource(function), "<the network here>", "exec"), names)
    found: Callable[..., Any] = names[function.__name__]
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
        "slowdowns": sorted(pair for one in known for pair in found[one]["slowdowns"]),
        "ranks_each": found[low]["ranks_each"],
        "computing_each": found[low]["computing_each"],
    }
