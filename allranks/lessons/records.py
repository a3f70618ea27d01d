"""Allreduces that ranks have run and recorded message by message, and predictions of a cost model.

Both sides; standard library only. A rank records what it received (`RankSteps`); the parts of all
ranks merge into one `AllreduceRun`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from allranks.errors import CollectiveError

Scalar = int | float | bool | str
"""One value as JSON can carry it; complex, nan and the infinities are text."""


@dataclass(frozen=True)
class Values:
    """The values of a chunk: all of a short one, else the first ones and the extremes."""

    count: int
    """Number of elements in the chunk."""
    items: tuple[Scalar, ...]
    """All elements, or the first few of a long chunk."""
    minimum: Scalar | None = None
    """Smallest element of a long chunk; None when ``items`` is complete."""
    maximum: Scalar | None = None
    """Largest element of a long chunk; None when ``items`` is complete."""

    @property
    def complete(self) -> bool:
        """True when ``items`` holds every element."""
        return len(self.items) == self.count


@dataclass(frozen=True)
class Step:
    """One message: a chunk from one rank to another, and its effect there."""

    number: int
    """The round, from 0; messages with equal numbers travel at the same time."""
    phase: str
    """"reduce-scatter", "allgather", "fold", "double", "unfold", "reduce" or "broadcast"."""
    sender: int
    receiver: int
    chunk: int
    """Index of the chunk; always 0 where the whole array travels."""
    start: int
    """First element of the chunk in the flattened array."""
    stop: int
    """One past the last element of the chunk in the flattened array."""
    nbytes: int
    """Bytes that travelled."""
    before: Values
    """The receiver's chunk before the message."""
    received: Values
    """The content of the message."""
    after: Values
    """The receiver's chunk after the message: combined, or replaced."""


@dataclass(frozen=True)
class RankSteps:
    """One rank's part of a run: its input, every message it received, its result."""

    algorithm: str
    op: str
    rank: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    input: Values
    steps: tuple[Step, ...]
    result: Values


@dataclass(frozen=True)
class AllreduceRun:
    """One allreduce from beginning to end, as recorded by all its ranks."""

    algorithm: str
    op: str
    size: int
    dtype: str
    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    """Every message once, ordered by round, then by receiver."""
    inputs: tuple[Values, ...]
    """One per rank, in the order of ranks."""
    result: Values
    """The same on every rank."""

    @property
    def rounds(self) -> int:
        """Number of rounds, in each of which messages travel at the same time."""
        return 1 + max((step.number for step in self.steps), default=-1)

    @property
    def nbytes(self) -> int:
        """Bytes that travelled, over all messages."""
        return sum(step.nbytes for step in self.steps)

    @classmethod
    def merge(cls, parts: Sequence[RankSteps]) -> AllreduceRun:
        """Merges one part per rank, given in any order.

        Raises:
            CollectiveError: a rank is missing or appears twice, or the ranks ran different
                things, or their results differ.
        """
        by_rank = sorted(parts, key=lambda part: part.rank)
        _check_same_run(by_rank)
        first = by_rank[0]
        steps = (step for part in by_rank for step in part.steps)
        return cls(
            algorithm=first.algorithm,
            op=first.op,
            size=first.size,
            dtype=first.dtype,
            shape=first.shape,
            steps=tuple(sorted(steps, key=lambda step: (step.number, step.receiver))),
            inputs=tuple(part.input for part in by_rank),
            result=first.result,
        )

    def to_dict(self) -> dict[str, Any]:
        """The run as dictionaries, lists, numbers and text, ready for JSON."""
        return {**asdict(self), "rounds": self.rounds, "nbytes": self.nbytes}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AllreduceRun:
        """The inverse of ``to_dict``, also after JSON, which turns tuples into lists."""

        def values(told: Mapping[str, Any]) -> Values:
            return Values(**{**told, "items": tuple(told["items"])})

        def step(told: Mapping[str, Any]) -> Step:
            each = {name: values(told[name]) for name in ("before", "received", "after")}
            return Step(**{**told, **each})

        return cls(
            data["algorithm"],
            data["op"],
            data["size"],
            data["dtype"],
            tuple(data["shape"]),
            tuple(map(step, data["steps"])),
            tuple(map(values, data["inputs"])),
            values(data["result"]),
        )


def _check_same_run(by_rank: Sequence[RankSteps]) -> None:
    ranks = [part.rank for part in by_rank]
    size = by_rank[0].size if by_rank else 0
    if not by_rank or ranks != list(range(size)):
        raise CollectiveError(
            f"a run needs one part from each of its {size} ranks: found ranks {ranks}. "
            "Record on every rank, and merge the parts of one allreduce at a time."
        )
    for what in ("algorithm", "op", "size", "dtype", "shape", "result"):
        expected, differing = getattr(by_rank[0], what), []
        for part in by_rank:
            if getattr(part, what) != expected:
                differing.append(part.rank)
        if differing:
            raise CollectiveError(
                f"a run needs the same {what} on every rank: rank 0 has {expected!r}, "
                f"ranks {differing} have another. Merge the parts of one allreduce at a time."
            )


@dataclass(frozen=True, repr=False)
class Prediction:
    """The time of one allreduce as the cost model predicts it; it has not been run."""

    algorithm: str
    protocol: str
    nbytes: int
    """Bytes of the array on each rank."""
    ranks: int
    hosts: int
    latency_seconds: float
    """The part that does not depend on the size of the array."""
    transfer_seconds: float
    """The part that grows with the array."""
    fabric: str
    """Name of the fabric, and the source of its numbers."""
    simulated: bool = field(default=True, init=False)

    @property
    def seconds(self) -> float:
        """Time of the allreduce, from the arrival of the last rank."""
        return self.latency_seconds + self.transfer_seconds

    @property
    def algbw_gbps(self) -> float | None:
        """10⁹ bytes of the array a second; None when nothing has to travel.

        Source: nccl-tests, doc/PERFORMANCE.md.
        """
        return self.nbytes / self.seconds / 1e9 if self.seconds else None

    @property
    def busbw_gbps(self) -> float | None:
        """The algorithm bandwidth times 2 (ranks - 1) / ranks; None for a single rank.

        Source: nccl-tests, doc/PERFORMANCE.md.
        """
        algbw = self.algbw_gbps
        return None if algbw is None else algbw * 2 * (self.ranks - 1) / self.ranks

    def __str__(self) -> str:
        bandwidth = "n/a" if self.busbw_gbps is None else f"{_digits(self.busbw_gbps)} GB/s"
        return (
            f"simulated allreduce of {self.nbytes:,} B over {_place(self.ranks, self.hosts)}: "
            f"{_time(self.seconds)}, busbw {bandwidth} "
            f"({self.algorithm}, {self.protocol}; {self.fabric})"
        )

    def __repr__(self) -> str:
        return f"<{self}>"


@dataclass(frozen=True, repr=False)
class StepPrediction:
    """One data-parallel training step as the cost model predicts it; it has not been run."""

    ranks: int
    hosts: int
    alone_seconds: float
    """A step on a single rank, without communication."""
    communication_seconds: float
    """All allreduces of a step, one after the other."""
    exposed_seconds: float
    """The part of the communication that the backward pass does not hide."""
    allreduces: int
    """How many allreduces a step makes, after fusion."""
    allreduce: Prediction
    """One of them."""
    simulated: bool = field(default=True, init=False)

    @property
    def seconds(self) -> float:
        """Time of one step on all ranks."""
        return self.alone_seconds + self.exposed_seconds

    @property
    def efficiency(self) -> float:
        """Work done per rank and second, relative to one rank alone: 1.0 is perfect scaling."""
        return self.alone_seconds / self.seconds

    @property
    def speedup(self) -> float:
        """Work done a second on all ranks, relative to one rank alone."""
        return self.ranks * self.efficiency

    def __str__(self) -> str:
        return (
            f"simulated step over {_place(self.ranks, self.hosts)}: "
            f"{_time(self.seconds)}, efficiency {self.efficiency:.0%} "
            f"({_time(self.alone_seconds)} alone, {_time(self.exposed_seconds)} of "
            f"{_time(self.communication_seconds)} communication not hidden; "
            f"{self.allreduces} allreduces, {self.allreduce.algorithm}; {self.allreduce.fabric})"
        )

    def __repr__(self) -> str:
        return f"<{self}>"


def _place(ranks: int, hosts: int) -> str:
    return (
        f"{ranks:,} {'rank' if ranks == 1 else 'ranks'} on "
        f"{hosts:,} {'host' if hosts == 1 else 'hosts'}"
    )


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{_digits(seconds)} s"
    if seconds >= 1e-3:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{_digits(seconds * 1e6)} µs"


def _digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


@dataclass(frozen=True)
class Explained:
    """One allreduce of a cluster's ranks."""

    run: AllreduceRun
    """Every message, as the ranks recorded it."""
    seconds: float
    """Shortest time of the same allreduce without a recorder, each as long as its slowest rank."""
    repeats: int
    """How many were timed."""
    prediction: Prediction
    """Of the model, fitted to allreduces of other sizes by the same ranks."""
