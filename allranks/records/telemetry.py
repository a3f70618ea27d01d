"""What a rank tells beside its output while a cell runs. Both sides; standard library only."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from allranks.records.collective import busbw_factor
from allranks.records.strip import Strip as Strip


@dataclass(frozen=True, slots=True)
class Points:
    """Values that a rank logged since its last batch.

    ``series`` holds ``[name, member, count]``. Payload frame 0 holds, series after series, as many
    pairs of a step and a value, as native 64-bit floats.
    ``dropped`` counts the values of this cell that came too fast to be sent.
    """

    rank: int
    cell: int
    series: tuple[list[Any], ...]
    dropped: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Sums over this cell's collectives; each of ``rows`` replaces the one of the same key.

    A row is a :class:`CallTotals` as a list.
    """

    rank: int
    cell: int
    rows: tuple[list[Any], ...]


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a rank is doing now, about once a second.

    ``activity`` is what it waits for, or empty; ``line`` is ``file:line  source``.
    ``cpu_percent`` is of one core, ``gpu_nbytes`` what the rank's GPU has in use, by whomever, 0
    without one; -1 for what the driver does not tell. ``importing`` is the package that the cell
    has been importing for a second or longer, or empty.
    """

    rank: int
    cell: int
    activity: str
    line: str
    rss_nbytes: int
    cpu_percent: int
    gpu_nbytes: int
    gpu_total_nbytes: int = 0
    gpu_percent: int = -1
    gpu_celsius: int = -1
    importing: str = ""


@dataclass(frozen=True, slots=True)
class CallTotals:
    """All calls of one op, name and size, summed on one rank.

    ``transfer_seconds`` is the time that they cost the rank, ``moving_seconds`` that for which the
    data moved: more, where a GPU moves it while the rank is at something else. ``last`` holds, for
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

    def to_row(self) -> list[Any]:
        """The totals as JSON carries them."""
        return list(astuple(self))

    @classmethod
    def from_row(cls, row: list[Any]) -> CallTotals:
        """The totals that :meth:`to_row` turned into ``row``, also after a trip through JSON."""
        last = tuple((rank, calls, seconds) for rank, calls, seconds in row[-1])
        named = dict(zip(cls.__dataclass_fields__, row, strict=True))
        return cls(**{**named, "last": last})


Telemetry = Points | Timings | Pulse | Strip


def busbw(op: str, ranks: int, nbytes: int, seconds: float) -> float | None:
    """Returns 10⁹ bytes a second as nccl-tests counts them; None where that means nothing."""
    factor = busbw_factor(op, ranks)
    if factor is None or ranks < 2 or not nbytes or seconds <= 0:
        return None
    return nbytes / seconds / 1e9 * factor
