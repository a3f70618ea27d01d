"""What one rank knows about one collective call. Both sides; standard library only."""

from __future__ import annotations

from dataclasses import dataclass

_HALF = frozenset({"allgather", "reducescatter", "alltoall", "gather", "scatter"})
_DIRECT = frozenset({"broadcast", "reduce", "send", "recv"})


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One collective call as one rank saw it.

    Times are seconds on one clock: CLOCK_MONOTONIC of the first rank's host. Ranks of one host
    share it; other hosts' clocks are corrected by the offset measured at ``init()``.
    """

    op: str
    name: str
    rank: int
    sequence: int
    epoch: int
    process_set: int
    ranks: int
    transport: str
    dtype: str
    nbytes: int
    """The S of nccl-tests: bytes of the largest of input and output on one rank."""
    arrived: float
    last_arrived: float
    last_rank: int
    ended: float
    device_seconds: float | None = None
    """What the GPU's own clock says of the transfer; None where none moved the data by itself."""
    attended: tuple[float, float] | None = None
    """For a call that was under way with others, as an asynchronous one may be: the seconds for
    which this rank waited in it and moved its data, without those that it spent on other things
    and those that count for another call. None for a call that was alone."""

    @property
    def wait_seconds(self) -> float:
        """Seconds between this rank's arrival and the last rank's, for which this rank waited."""
        if self.attended is not None:
            return self.attended[0]
        return max(0.0, self.last_arrived - self.arrived)

    @property
    def transfer_seconds(self) -> float:
        """Seconds from the moment every rank had arrived to the end of the call.

        By the GPU's clock where it moved the data: the host notices the end a little later. Of a
        call that was under way with others, those for which this rank was at it.
        """
        return self.moving_seconds if self.attended is None else self.attended[1]

    @property
    def moving_seconds(self) -> float:
        """Seconds for which the data moved: on a GPU it does so beside what the rank is at."""
        if self.device_seconds is not None:
            return self.device_seconds
        if self.attended is not None:
            return self.attended[1]
        return max(0.0, self.ended - max(self.last_arrived, self.arrived))

    @property
    def algbw_gbps(self) -> float | None:
        """S / t in 10⁹ bytes a second; None for one rank or nothing to move.

        Source: nccl-tests, doc/PERFORMANCE.md.
        """
        if self.ranks < 2 or not self.nbytes or not self.moving_seconds:
            return None
        return self.nbytes / self.moving_seconds / 1e9

    @property
    def busbw_gbps(self) -> float | None:
        """algbw × the factor that makes it comparable with the hardware's peak.

        allreduce 2(n−1)/n; allgather, reducescatter, alltoall, gather and scatter (n−1)/n;
        broadcast, reduce, send and recv 1; None for anything else.

        Source: nccl-tests, doc/PERFORMANCE.md.
        """
        algbw = self.algbw_gbps
        factor = busbw_factor(self.op, self.ranks)
        return None if algbw is None or factor is None else algbw * factor


def busbw_factor(op: str, ranks: int) -> float | None:
    """Returns what an op's algbw is multiplied with for its busbw; None where it has none.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    kind = op.removeprefix("grouped_")
    if kind == "allreduce":
        return 2 * (ranks - 1) / ranks
    if kind in _HALF:
        return (ranks - 1) / ranks
    return 1.0 if kind in _DIRECT else None
