"""Records of cells with a known cause: exact times, without a clock."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from allranks.features.verdict.records import (
    CellParts,
    CodeLine,
    Doing,
    EndedCall,
    Kind,
    Look,
    RankPart,
    Sample,
)

GRADIENTS = Kind("allreduce", "In[3]:9", 100_000, 0, "allreduce(gradients)")
#: The lines of a rank's work, with the share of each.
Spent = Sequence[tuple[tuple[CodeLine, ...], float]]
#: The seconds for which a rank computes in a step.
Work = float | Callable[[int, random.Random], float]


def cell(
    work: Sequence[Work],
    *,
    steps: int = 300,
    transfer: float = 1e-3,
    jitter: float = 0.0,
    bursts: float = 0.0,
    seed: int = 0,
    kinds: Sequence[Kind] = (GRADIENTS,),
    ready: Mapping[int, float] | None = None,
    busy: float = 0.9,
    idle: float = 0.0,
    memory: Callable[[int, float], float] = lambda rank, at: 5e8,
    hosts: Sequence[str] = (),
    lines: Mapping[int, Spent] | None = None,
    does: Mapping[tuple[CodeLine, ...], tuple[Doing, *tuple[float, ...]]] | None = None,
    ahead: float = 0.0,
    **more: Any,
) -> CellParts:
    """Returns a cell whose steps have one call of each kind.

    ``jitter`` is the deviation of the logarithm of each work, ``bursts`` how likely a rank is
    interrupted in a call. Of a second, the threads of a rank ran for ``busy``, and waited for a
    core for ``ready``; both cores of the host were idle for ``idle`` together. ``lines`` are those
    at which each rank works, one after the other; ``does`` is what it does there, with how many
    cores its main thread, all its threads and those use that read data, the last ones as far as
    they are found reading, and altogether. These also use ``ahead`` cores in collectives.
    """
    random_of = random.Random(seed)
    size, now = len(work), 0.0
    rows: list[list[EndedCall]] = [[] for _ in work]
    begins: list[list[float]] = [[] for _ in work]
    places: list[list[int]] = [[] for _ in work]
    paths = [path for path, _ in chain(*(lines or {}).values())]
    for step in range(steps):
        for at in range(len(kinds)):
            arrived = []
            for one in work:
                each = one(step, random_of) if callable(one) else one
                each *= random_of.lognormvariate(0, jitter) / len(kinds)
                if random_of.random() < bursts:
                    each += random_of.expovariate(50)
                arrived.append(now + each)
            last = max(range(size), key=lambda rank: arrived[rank])
            for rank, spent in (lines or {}).items():
                begun = now
                for path, share in spent:
                    begins[rank].append(begun)
                    places[rank].append(paths.index(path))
                    begun += share * (arrived[rank] - now)
                begins[rank].append(arrived[rank])
                places[rank].append(-1)
            now = arrived[last] + transfer
            for rank, row in enumerate(rows):
                row.append(EndedCall(at, now, arrived[last] - arrived[rank], transfer, last))
    times = [0.2 + at for at in range(int(now) + 2)]
    looks = [0.05 * (at + random_of.random()) for at in range(int(20 * now))]

    def place(rank: int, at: float) -> int:
        return places[rank][bisect(begins[rank], at) - 1] if begins[rank] else -1

    def looked(rank: int) -> list[Look]:
        found, before, main, used, readers = [], 0.0, 0.0, 0.0, 0.0
        for at in looks:
            path = place(rank, at)
            nothing = Doing.COMPUTE, 1.0, 1.0
            if path < 0:
                nothing = Doing.COLLECTIVE, 1.0, 1.0, ahead
            doing, *cores = (does or {}).get(paths[path], nothing) if path >= 0 else nothing
            main, used = main + cores[0] * (at - before), used + cores[1] * (at - before)
            reading = cores[2] if len(cores) > 2 else 0.0
            readers += (cores[3] if len(cores) > 3 else reading) * (at - before)
            more = {"readers_used": readers, "reading": reading}
            found.append(Look(at, path, doing, main, used, **more))
            before = at
        return found

    parts = [
        RankPart(
            rank=rank,
            number=3,
            host=hosts[rank] if hosts else "here",
            cores=2,
            kinds=[replaced(kind, ranks=size) for kind in kinds],
            calls=row,
            samples=[
                Sample(
                    at, busy * at, (ready or {}).get(rank, 0.0) * at,
                    (ready or {}).get(rank, 0.0) * at, memory(rank, at), idle * at,
                )
                for at in times
            ],
            looks=looked(rank),
            paths=paths,
        )
        for rank, row in enumerate(rows)
    ]  # fmt: skip
    return CellParts(number=3, ranks=parts, **more)


def replaced(kind: Kind, **fields: Any) -> Kind:
    return kind._replace(**fields)


def each_rank(parts: CellParts, **fields: Any) -> CellParts:
    return replace(parts, ranks=[replace(part, **fields) for part in parts.ranks])


def varied(step: int, random_of: random.Random) -> float:
    return random_of.choice([0.002, 0.02])


def often_short(step: int, random_of: random.Random) -> float:
    return 0.5 if step % 50 == 49 else 0.01
