"""What a rank measures, and what it reports of that while a cell runs.

Both sides; standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from allranks.records.frozen import frozen
from allranks.records.ranks import Activity
from allranks.records.wire import Record, fits

_HALF = "allgather", "reducescatter", "alltoall", "gather", "scatter"
_DIRECT = "broadcast", "reduce", "send", "recv"
_NUMBER = int, float
#: The types of a row of `Timings`, and of each entry of its last one.
_ROW = *(str, str, str, int, int, str, int), *((_NUMBER,) * 4), list
_LAST = int, int, _NUMBER
#: The bytes of a step with its value in `Points`, and those of a bin in the frames of a `Strip`.
_PAIR_NBYTES, _BIN_NBYTES = 16, (3, 2)


@frozen
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
    #: The S of nccl-tests: bytes of the largest of input and output on one rank.
    nbytes: int
    arrived: float
    last_arrived: float
    last_rank: int
    ended: float
    #: The time of the transfer by the GPU's clock, or, of a staged call, of the copies from and to
    #: the GPU, which run beside each other, or, of a call by ipc, of this rank's own work on the
    #: GPU; None if no GPU took part.
    device_seconds: float | None = None
    #: For a call that was under way with others, as an asynchronous one may be: the seconds for
    #: which this rank waited in it and moved its data, without those that it spent on other things
    #: and those that count for another call. None for a call that was alone.
    attended: tuple[float, float] | None = None

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
        if self.device_seconds is not None and self.transport not in ("staged", "ipc"):
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
        """algbw × the factor that makes it comparable with the hardware's peak."""
        return busbw(self.op, self.ranks, self.nbytes, self.moving_seconds)


def busbw(op: str, ranks: int, nbytes: int, seconds: float) -> float | None:
    """Returns 10⁹ bytes a second as nccl-tests counts them; None where that is not defined.

    The factor is 2(n−1)/n for allreduce; (n−1)/n for allgather, reducescatter, alltoall, gather and
    scatter; 1 for broadcast, reduce, send and recv. Source: nccl-tests, doc/PERFORMANCE.md.
    """
    if ranks < 2 or not nbytes or seconds <= 0:
        return None
    share, kind = (ranks - 1) / ranks, op.removeprefix("grouped_")
    factors = {"allreduce": 2 * share, **dict.fromkeys(_HALF, share), **dict.fromkeys(_DIRECT, 1.0)}
    return nbytes / seconds / 1e9 * factors[kind] if kind in factors else None


@frozen
class CallTotals:
    """All calls of one op, name and size, summed on one rank.

    ``transfer_seconds`` is the time that they cost the rank, ``moving_seconds`` that for which the
    data moved: more, if a GPU moves it while the rank does something else. ``last`` holds, for
    each rank that was the last to arrive, how often it was and for how many seconds this rank
    waited then.
    """

    op: str
    name: str
    dtype: str
    nbytes: int
    ranks: int
    transport: str
    calls: int
    wait_seconds: float
    transfer_seconds: float
    moving_seconds: float
    fastest_seconds: float
    last: tuple[tuple[int, int, float], ...]

    @property
    def key(self) -> tuple[str, str, str, int, int, str]:
        """What these calls have in common."""
        return self.op, self.name, self.dtype, self.nbytes, self.ranks, self.transport

    @property
    def busbw_gbps(self) -> float | None:
        """Bus bandwidth over all of these calls, as nccl-tests defines it."""
        return busbw(self.op, self.ranks, self.nbytes * self.calls, self.moving_seconds)

    @property
    def best_busbw_gbps(self) -> float | None:
        """Bus bandwidth of the fastest of these calls."""
        return busbw(self.op, self.ranks, self.nbytes, self.fastest_seconds)

    @classmethod
    def from_row(cls, row: list[Any]) -> CallTotals:
        """The totals that ``astuple`` turned into ``row``, also after a trip through JSON."""
        last = tuple((rank, calls, seconds) for rank, calls, seconds in row[-1])
        named = dict(zip(cls.__dataclass_fields__, row, strict=True))
        return cls(**{**named, "last": last})


@frozen
class Telemetry(Record):
    """Base class of what a rank reports beside its output while it runs a cell."""

    rank: int
    cell: int


@frozen
class Points(Telemetry):
    """Values that a rank logged since its last batch.

    ``series`` holds ``[name, member, count]``. Payload frame 0 holds, series after series, as many
    pairs of a step and a value, as native 64-bit floats.
    ``dropped`` counts the values of this cell that came too fast to be sent.
    """

    series: tuple[list[Any], ...]
    dropped: int

    def check(self, payloads: Sequence[bytes] = ()) -> None:
        """Raises TypeError also if a series has another form, or not as many values."""
        Record.check(self)
        known = all(fits(one, (str, str, int)) and one[2] >= 0 for one in self.series)
        nbytes = _PAIR_NBYTES * sum(one[2] for one in self.series) if known else -1
        if [len(payload) for payload in payloads] != [nbytes]:
            raise TypeError(f"series is of another form: {self.series!r:.60}")


@frozen
class Timings(Telemetry):
    """Sums over this cell's collectives; each of ``rows`` replaces the one of the same key.

    A row is a :class:`CallTotals` as a list.
    """

    rows: tuple[list[Any], ...]

    def check(self, payloads: Sequence[bytes] = ()) -> None:
        """Raises TypeError also if a row has another form."""
        Record.check(self)
        for row in self.rows:
            if not fits(row, _ROW) or not all(fits(one, _LAST) for one in row[-1]):
                raise TypeError(f"rows has one of another form: {row!r:.60}")


@frozen
class Pulse(Telemetry):
    """What a rank is doing now, about once a second.

    ``line`` is ``file:line  source``.
    ``cpu_percent`` is of one core, ``gpu_nbytes`` what the rank's GPU has in use, by any process, 0
    without one, ``gpu_own_nbytes`` the rank's part of it, 0 if it is not known; -1 for other
    figures that the driver does not report. ``importing`` is the package that the cell has been
    importing for a second or longer, or empty. ``optimizer_steps`` is how many steps optimizers of
    libraries have made in the cell.
    """

    doing: Activity
    line: str
    rss_nbytes: int
    cpu_percent: int
    gpu_nbytes: int = 0
    gpu_total_nbytes: int = 0
    gpu_percent: int = -1
    gpu_celsius: int = -1
    importing: str = ""
    gpu_own_nbytes: int = 0
    optimizer_steps: int = 0

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        return super().from_fields({**fields, "doing": Activity.read(fields["doing"])})


@frozen
class Strip(Telemetry):
    """How a rank spent its time in a cell, sent when the rank has ended the cell.

    While a reader has the view open, it is also sent about once a second: only the bins that have
    changed, from ``first`` on. A wait that is not over counts up to now.

    ``width_seconds`` is that of a bin. Payload frame 0 holds, for each bin, the shares in which the
    rank was importing, waiting and transferring, each as a byte of which 255 is all; frame 1 the
    rank for which it waited longest in each bin, as native 16-bit integers, -1 for none.
    ``importing`` holds ``[module, seconds]``, ``waits`` ``[rank, seconds]``, the longest first.
    ``steps`` holds the first step that was logged and when, and the last one and when; or nothing.
    """

    seconds: float
    width_seconds: float
    importing: tuple[list[Any], ...]
    waits: tuple[list[Any], ...]
    transfer_seconds: float
    steps: tuple[float, ...]
    first: int = 0

    def check(self, payloads: Sequence[bytes] = ()) -> None:
        """Raises TypeError also if a list has another form, or a bin is missing."""
        Record.check(self)
        known = all(fits(one, (str, _NUMBER)) for one in self.importing)
        known = known and all(fits(one, (int, _NUMBER)) for one in self.waits)
        known = known and fits(list(self.steps), (_NUMBER,) * (4 if self.steps else 0))
        sizes = list(map(len, payloads))
        bins = sizes[0] // _BIN_NBYTES[0] if sizes else 0
        same = sizes == [bins * each for each in _BIN_NBYTES]
        if not known or not same or self.width_seconds <= 0 or self.first < 0:
            raise TypeError(f"a strip of another form: {self!r:.60}")
