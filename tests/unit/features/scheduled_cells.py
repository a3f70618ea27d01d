"""Records of a cell whose ranks share cores with each other and with other programs.

A scheduler gives each core to the program that has run for the shortest time, for a slice of time.
All times are computed, without a clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from allranks.features.verdict.records import CellParts, EndedCall, Kind, RankPart, Sample
from tests.unit.features.recorded_cells import GRADIENTS

#: The seconds for which a rank computes before the first call of a step.
Work = float | Callable[[int, random.Random], float]
_TICK = 1e-4
_SLICE_SECONDS = 3e-3
_WAKE_SECONDS = 5e-5
_TRANSFER_SECONDS = 5e-5
_PAUSE_SECONDS = 2e-5


class _Program:
    """A rank, or an endless loop without work of a step."""

    def __init__(self, work: Work | None) -> None:
        self.work = work
        self.run = self.ready = self.ran = self.slice = 0.0
        self.left = self.wakes = 0.0
        self.arrived: float | None = None

    def can_run(self, now: float) -> bool:
        return self.work is None or (self.arrived is None and self.wakes <= now)


def cell(
    work: Sequence[Work],
    *,
    others: int = 0,
    calls: int = 1,
    kind: Kind = GRADIENTS,
    cores: int = 2,
    total: float = 2.0,
    seed: int = 0,
) -> CellParts:
    """Returns a cell of some seconds; each step has calls of one kind, one after the other.

    ``others`` are the endless loops of other programs.
    """
    random_of = random.Random(seed)
    ranks = [_Program(one) for one in work]
    programs = ranks + [_Program(None) for _ in range(others)]
    rows: list[list[EndedCall]] = [[] for _ in ranks]
    samples: list[list[Sample]] = [[] for _ in ranks]
    running: list[_Program] = []
    now = idle = 0.0
    number = 0

    def begin(one: _Program) -> None:
        step, call = divmod(number, calls)
        seconds = one.work(step, random_of) if callable(one.work) else one.work or 0.0
        one.left = random_of.lognormvariate(0, 0.1) * (_PAUSE_SECONDS if call else seconds)
        one.arrived = None

    for one in ranks:
        begin(one)
    while now < total:
        can_run = [one for one in programs if one.can_run(now)]
        running = [one for one in running if one in can_run and one.slice < _SLICE_SECONDS]
        waiting = [one for one in can_run if one not in running]
        waiting.sort(key=lambda one: (one.ran, random_of.random()))
        for one in waiting[: cores - len(running)]:
            one.slice = 0.0
            running.append(one)
        least = min((one.ran for one in can_run), default=0.0)
        now += _TICK
        idle += _TICK * (cores - len(running))
        for one in can_run:
            if one not in running:
                one.ready += _TICK
                continue
            one.run, one.ran, one.slice = one.run + _TICK, one.ran + _TICK, one.slice + _TICK
            one.left -= _TICK
            if one.work is not None and one.left <= 0:
                one.arrived = now + one.left
        arrived = [one.arrived for one in ranks]
        times = [at for at in arrived if at is not None]
        if len(times) == len(ranks):
            last = max(range(len(ranks)), key=lambda rank: times[rank])
            ended, number = times[last] + _TRANSFER_SECONDS, number + 1
            for rank, one in enumerate(ranks):
                wait = times[last] - times[rank]
                rows[rank].append(EndedCall(0, ended, wait, _TRANSFER_SECONDS, last))
                begin(one)
                one.wakes = ended + (_WAKE_SECONDS if rank != last else 0.0)
                # Who has slept is not ahead of the others for long.
                one.ran = max(one.ran, least - _SLICE_SECONDS)
        if now >= len(samples[0]) + 0.2:
            for row, one in zip(samples, ranks, strict=True):
                row.append(Sample(now, one.run, one.ready, one.ready, 5e8, idle))
    for row, one in zip(samples, ranks, strict=True):
        row.append(Sample(now, one.run, one.ready, one.ready, 5e8, idle))
    return CellParts(
        number=3,
        ranks=[
            RankPart(
                rank=rank,
                number=3,
                host="here",
                cores=cores,
                kinds=[kind._replace(ranks=len(ranks))],
                calls=rows[rank],
                samples=samples[rank],
            )
            for rank in range(len(ranks))
        ],
    )
