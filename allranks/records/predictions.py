"""What the cost model foretells; every record and every text made from it says "simulated"."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, repr=False)
class Prediction:
    """The time of one allreduce as the cost model foretells it; it has not been run."""

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
    """Name of what connects the ranks, and where its numbers come from."""
    simulated: bool = field(default=True, init=False)

    @property
    def seconds(self) -> float:
        """Time of the allreduce, from the moment the last rank arrives."""
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
    """One data-parallel training step as the cost model foretells it; it has not been run."""

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
