"""The loop of a cell: its steps on each rank, and what a rank did in them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from allranks.features.verdict import LEAST_STEPS
from allranks.features.verdict.records import (
    CellParts,
    CodeLine,
    Doing,
    EndedCall,
    Kind,
    RankPart,
    Sample,
)

#: Shares of the time at the user's lines, the outermost line first.
Spent = dict[tuple[CodeLine, ...], float]
#: The first steps belong to the start if they are this much slower than the median: a library is
#: imported, or compiles what later steps use. So do much slower ones in the first tenth.
_SLOW_FIRST, _LEAST_START, _SLOW_START, _START_SHARE = 4, 3, 10, 10
#: The calls that end the steps span this much of all calls, or of their time.
_SPAN = 0.8
#: The samples have to cover this much of the loop.
_COVERED = 0.5
#: Fewer looks do not tell at which lines a rank spends its time.
_LEAST_LOOKS = 40
#: What goes on in every step has this part of its mean in each quarter of the steps.
_STEADY = 0.5
#: Other programs use little of a host whose ranks and idle cores are this part of all cores.
OWN_CORES = 0.75
#: The part of the time of threads that read data which moments have to find: they also begin after
#: the interpreter was taken from such a thread, and end when it reads no more.
_FOUND_READING = 0.25
#: By how much looks may differ from the exact share of the time outside of collectives.
_LOOKS_ERROR = 0.15


class Looked(NamedTuple):
    """A look: its time and share, the lines and what was done there, and the cores used.

    ``late`` are the seconds by which it came too late. ``readers`` are the cores of threads that
    also read data, and ``reading`` those of such threads that read in this moment.
    """

    at: float
    share: float
    path: tuple[CodeLine, ...]
    doing: Doing
    main_cores: float
    cores: float
    late: float
    readers: float
    reading: float


class RankLoop:
    """The steps of one rank.

    ``edges`` are the ends of the calls that end its steps; ``whole`` are those of its calls in
    which all ranks of the cell took part.
    """

    def __init__(self, part: RankPart, edges: Sequence[float], size: int) -> None:
        self.part = part
        self.edges = edges
        self.seconds = max(1e-9, edges[-1] - edges[0])
        self.calls = [call for call in part.calls if edges[0] < call.ended <= edges[-1]]
        self.whole = [call for call in self.calls if part.kinds[call.kind].meets(size)]
        self.wait = sum(call.wait for call in self.calls)
        self.transfer = sum(call.transfer for call in self.calls)
        self.computing = max(0.0, self.seconds - self.wait - self.transfer)
        self.usual_step = max(1e-9, median(after - before for before, after in pairwise(edges)))

    @cached_property
    def waits(self) -> dict[int, float]:
        """The seconds for which this rank waited for each other one."""
        found: dict[int, float] = defaultdict(float)
        for call in self.whole:
            if call.last not in (-1, self.part.rank):
                found[call.last] += call.wait
        return found

    def waits_in_steps(self, *ranks: int) -> list[float]:
        """Returns the wait in each step, for some ranks or all, as a share of the median step."""
        sums = [0.0] * (len(self.edges) - 1)
        for call in self.whole:
            if not ranks or call.last in ranks:
                sums[bisect_left(self.edges, call.ended) - 1] += call.wait
        return [wait / self.usual_step for wait in sums]

    @cached_property
    def used(self) -> Sample | None:
        """The differences of the counters over the loop; None if too few samples are known."""
        if self._sampled is None:
            return None
        a, b = self._sampled
        covered = (min(b.at, self.edges[-1]) - max(a.at, self.edges[0])) / self.seconds
        # The first sample is taken a moment after the cell's beginning. Samples are rare: before
        # calls that are left out they are of the same loop, and of more time than the calls.
        scale = self.seconds / (b.at - a.at) if self.part.left_out else 1 / covered
        return Sample(
            self.seconds,
            scale * (b.run - a.run),
            scale * (b.ready - a.ready),
            scale * (b.main_ready - a.main_ready),
            b.rss_nbytes - a.rss_nbytes,
            scale * (b.idle - a.idle),
        )

    @property
    def main_ready(self) -> float | None:
        """How much of the time the main thread had no core, between the samples around the loop.

        A wait for a core is counted at its end: it may have begun before the first sample.
        """
        if self._sampled is None:
            return None
        a, b = self._sampled
        return min(1.0, (b.main_ready - a.main_ready) / (b.at - a.at))

    @cached_property
    def _sampled(self) -> tuple[Sample, Sample] | None:
        """The samples next to both ends of the loop; None if they cover too little of it."""
        samples, began, ended = self.part.samples, self.edges[0], self.edges[-1]
        first = max((at for at, one in enumerate(samples) if one.at <= began), default=0)
        last = next((at for at, one in enumerate(samples) if one.at >= ended), len(samples) - 1)
        if last <= first:
            return None
        a, b = samples[first], samples[last]
        covered = (min(b.at, ended) - max(a.at, began)) / self.seconds
        return (a, b) if covered >= _COVERED else None

    @cached_property
    def lines(self) -> Spent | None:
        """The shares of the time at the user's lines, each with all lines that it was called from.

        None if `looked` is.
        """
        return None if self.looked is None else self.spent(lambda _: True)

    @cached_property
    def looked(self) -> list[Looked] | None:
        """The looks in the loop, each for the time since the look before it.

        None if there are few looks, or if these have found the rank in collectives for another
        time than the calls took: C code may hold the interpreter, or each step be looked at in the
        same moment.
        """
        looks = [look for look in self.part.looks if self.edges[0] <= look.at <= self.edges[-1]]
        if len(looks) <= _LEAST_LOOKS:
            return None
        whole = looks[-1].at - looks[0].at
        # A late look, as after C code that held the interpreter, stands for all that time.
        found = [
            Looked(
                look.at,
                (look.at - before.at) / whole,
                self.part.paths[look.path] if look.path >= 0 else (),
                look.doing,
                (look.main_used - before.main_used) / max(1e-9, look.at - before.at),
                (look.used - before.used) / max(1e-9, look.at - before.at),
                look.late,
                (look.readers_used - before.readers_used) / max(1e-9, look.at - before.at),
                look.reading,
            )
            for before, look in pairwise(looks)
        ]
        seen = sum(one.share for one in found if one.path or one.doing is Doing.AWAIT)
        return found if abs(seen - self.computing / self.seconds) <= _LOOKS_ERROR else None

    @property
    def cores(self) -> float:
        """How many cores the process has used in the time of the looks, as a mean."""
        return sum(one.share * one.cores for one in self.looked or ())

    @cached_property
    def reading(self) -> float:
        """How many of them threads have used that read data beside the main thread.

        A moment is too short for one that has lost its core to get it back. All time of these
        threads is longer, and may be that of other work, if too little of it is found in moments.
        """
        found = self.looked or ()
        in_moments = sum(one.share * one.reading for one in found)
        whole = sum(one.share * one.readers for one in found)
        if in_moments < _FOUND_READING * whole:
            return in_moments
        return max(in_moments, min(whole, sum(one.share for one in found if one.reading)))

    def spent(self, chosen: Callable[[Looked], bool]) -> Spent:
        """Returns the shares of the time of some looks by lines, each with its callers."""
        found: Spent = defaultdict(float)
        for one in self.looked or ():
            if chosen(one):
                for depth in range(1 + len(one.path)):
                    found[one.path[:depth]] += one.share
        return found

    def steadily(self, chosen: Callable[[Looked], bool]) -> float:
        """Returns the share of the time of some looks; 0 where a quarter of the steps has few.

        A step may stand still for long, as between epochs. Of a long loop, the looks are those of
        its last steps.
        """
        quarters, looked = [0.0] * 4, self.looked or ()
        first = bisect_left(self.edges, looked[0].at) if looked else 0
        for one in looked:
            if chosen(one):
                step = bisect_left(self.edges, one.at) - first
                quarters[min(3, 4 * step // max(1, len(self.edges) - first))] += one.share
        share = sum(quarters)
        return share if min(quarters) >= _STEADY * share / 4 else 0.0


class Loop:
    """The same steps on all ranks; ``kind`` is that of the call that ends a step."""

    def __init__(self, kind: Kind, ranks: dict[int, RankLoop]) -> None:
        self.kind = kind
        self.ranks = ranks
        self.steps = len(next(iter(ranks.values())).edges) - 1
        self.first = ranks[min(ranks)]

    @classmethod
    def of(cls, cell: CellParts) -> Loop | None:
        """Returns the cell's loop; None if it has no loop in which all ranks meet."""
        size = len(cell.ranks)
        if size < 2 or any(not part.calls for part in cell.ranks):
            return None
        key = _step_key(cell.ranks[0], size, cell.logged)
        if key is None:
            return None
        ends = [
            [call.ended for call in part.calls if _matches(part.kinds[call.kind], key)]
            for part in cell.ranks
        ]
        # From the end, because a rank may have sent its last calls only.
        count = min(map(len, ends))
        if count < LEAST_STEPS:
            return None
        ends = [times[-count:] for times in ends]
        # Of the fewest steps, some may belong to the start.
        first = max(map(_first_step, ends))
        if count - first < LEAST_STEPS - _LEAST_START:
            return None
        kind = next(kind for kind in cell.ranks[0].kinds if _matches(kind, key))
        return cls(
            kind,
            {
                part.rank: RankLoop(part, times[first:], size)
                for part, times in zip(cell.ranks, ends, strict=True)
            },
        )

    @property
    def seconds(self) -> float:
        return fmean(one.seconds for one in self.ranks.values())

    @property
    def step(self) -> float:
        return self.seconds / self.steps

    @property
    def waiting(self) -> float:
        """The share of the time in which a rank waits, as a mean over ranks."""
        return fmean(one.wait / one.seconds for one in self.ranks.values())

    @property
    def transfer(self) -> float:
        return fmean(one.transfer / one.seconds for one in self.ranks.values())

    @property
    def computing(self) -> float:
        return fmean(one.computing / one.seconds for one in self.ranks.values())

    @cached_property
    def late(self) -> dict[int, float]:
        """For each rank the share of the time in which another one waits for it, as a mean."""
        return {
            rank: sum(
                one.waits.get(rank, 0.0) / one.seconds
                for other, one in self.ranks.items()
                if other != rank
            )
            / (len(self.ranks) - 1)
            for rank in self.ranks
        }

    def ready(self, rank: int) -> float | None:
        """Returns how much of the time the threads of a rank could run and had no core: a sum over
        its threads. None if that is not known.
        """
        used = self.ranks[rank].used
        return used.ready / used.at if used is not None else None

    @cached_property
    def has_hosts_alone(self) -> bool:
        """Whether other programs use little of the hosts: what a rank lacks, the others have."""
        left = [self.left_to_ranks(ranks) for ranks in self.by_host().values()]
        return all(share is not None and share >= OWN_CORES for share in left)

    def left_to_ranks(self, ranks: Sequence[int]) -> float | None:
        """Returns the part of a host's cores that its ranks have used, or could have: no program
        has used it. None if it is not known.
        """
        used = [one for rank in ranks if (one := self.ranks[rank].used) is not None]
        if len(used) < len(ranks):
            return None
        found = sum(one.run / one.at for one in used) + fmean(one.idle / one.at for one in used)
        return None if math.isnan(found) else found / self.cores_of(ranks)

    def computes(self, rank: int) -> float:
        """Returns the seconds of a step in which a rank is in no collective."""
        return self.ranks[rank].computing / self.steps

    def cores_of(self, ranks: Sequence[int]) -> float:
        """Returns how many cores the ranks of a host may use together."""
        return max(self.ranks[rank].part.cores for rank in ranks)

    def by_host(self) -> dict[str, list[int]]:
        hosts: dict[str, list[int]] = {}
        for rank, one in self.ranks.items():
            hosts.setdefault(one.part.host, []).append(rank)
        return hosts


_Key = tuple[str, str, int | None]


def _matches(kind: Kind, key: _Key) -> bool:
    op, name, nbytes = key
    return (kind.op, kind.name) == (op, name) and nbytes in (None, kind.nbytes)


def _step_key(part: RankPart, size: int, logged: int) -> _Key | None:
    """Returns the kind of call whose calls end a step.

    If the cell logs steps, it is the one with about as many calls, else the one with the fewest: a
    step may have many calls of one line.
    """
    for with_nbytes in (True, False):
        at: dict[_Key, list[int]] = defaultdict(list)
        for index, call in enumerate(part.calls):
            kind = part.kinds[call.kind]
            if kind.meets(size):
                at[kind.op, kind.name, kind.nbytes if with_nbytes else None].append(index)
        fit = {key: len(row) for key, row in at.items() if _is_loop(part.calls, row)}
        if fit:
            # Of equal counts the last call of a step ends it.
            wanted = logged if logged >= LEAST_STEPS else 1
            return min(fit, key=lambda key: (abs(math.log(fit[key] / wanted)), -at[key][-1]))
    return None


def _is_loop(calls: Sequence[EndedCall], row: Sequence[int]) -> bool:
    """Whether some of the calls span most of the calls, or most of their time."""
    if len(row) < LEAST_STEPS:
        return False
    seconds, whole = (calls[b].ended - calls[a].ended for a, b in ((row[0], row[-1]), (0, -1)))
    return row[-1] - row[0] >= _SPAN * (len(calls) - 1) or seconds >= _SPAN * whole


def _first_step(ends: Sequence[float]) -> int:
    gaps = [after - before for before, after in pairwise(ends)]
    usual = median(gaps)
    slow = [
        at
        for at, gap in enumerate(gaps[: max(_LEAST_START, len(ends) // _START_SHARE)])
        if gap > (_SLOW_FIRST if at < _LEAST_START else _SLOW_START) * usual
    ]
    return slow[-1] + 1 if slow else 0
