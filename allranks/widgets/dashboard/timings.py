"""Where the time of a cell went: collectives by call and rank, and each rank's time in bins."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from allranks.records.telemetry import CallTotals, Strip, Timings, busbw
from allranks.widgets.palette import KINDS

#: Most values of the bandwidth over the cell.
_RECENT = 32
#: Of ranks with equal work, too, one is last most often. A rank is named if the waits for it exceed
#: its part of all of them by this part.
_BEYOND_CHANCE = 0.2


@dataclass(frozen=True)
class CallRow:
    """One kind of call over all ranks; seconds are means over ranks."""

    op: str
    name: str
    dtype: str
    nbytes: int
    ranks: int
    calls: int
    wait_seconds: float
    transfer_seconds: float
    busbw_gbps: float | None
    best_gbps: float | None


@dataclass(frozen=True)
class RankRow:
    """All calls of one rank."""

    rank: int
    calls: int
    wait_seconds: float
    transfer_seconds: float


@dataclass(frozen=True)
class Straggler:
    """The rank for which the others waited longest, all together for ``seconds``.

    It was last in ``times`` of ``calls`` calls.
    """

    rank: int
    times: int
    calls: int
    seconds: float


class TimingTable:
    """The totals of every rank's calls in one cell."""

    def __init__(self) -> None:
        self._totals: dict[tuple[Any, ...], dict[int, CallTotals]] = {}
        self._recent: dict[tuple[Any, ...], _Recent] = {}
        self.changed = False
        self.cause = ""
        """Why the cell was slow, or wrong; known after its end, if one cause stands out."""

    def __bool__(self) -> bool:
        return bool(self._totals)

    def take(self, record: Timings) -> None:
        for row in record.rows:
            totals = CallTotals.from_row(row)
            self._totals.setdefault(totals.key, {})[record.rank] = totals
            # Of one rank: transfer, without waiting, takes all ranks about the same time.
            recent = self._recent.setdefault(_kind(totals), _Recent(record.rank))
            if recent.rank == record.rank:
                recent.take(totals)
        self.changed = True

    def by_call(self) -> list[CallRow]:
        # The costliest first.
        rows = [_row_over_ranks(list(ranks.values())) for ranks in self._totals.values()]
        return sorted(rows, key=lambda row: -(row.wait_seconds + row.transfer_seconds))

    def recent(self, row: CallRow) -> list[float]:
        # The bus bandwidth in each part of the cell.
        found = self._recent.get(_kind(row))
        return [] if found is None else [float(f"{value:.3g}") for value in found.values]

    def by_rank(self) -> list[RankRow]:
        sums: dict[int, list[Any]] = {}
        for ranks in self._totals.values():
            for rank, totals in ranks.items():
                row = sums.setdefault(rank, [0, 0.0, 0.0])
                row[0] += totals.calls
                row[1] += totals.wait_seconds
                row[2] += totals.transfer_seconds
        return [RankRow(rank, *row) for rank, row in sorted(sums.items())]

    def straggler(self) -> Straggler | None:
        """Returns the rank that the others waited for; None if each had about its turn."""
        seconds: dict[int, float] = {}
        times: dict[int, int] = {}
        calls = 0
        for ranks in self._totals.values():
            most: dict[int, int] = {}
            for totals in ranks.values():
                for last, count, waited in totals.last:
                    most[last] = max(most.get(last, 0), count)
                    seconds[last] = seconds.get(last, 0.0) + waited
            calls += sum(most.values())
            for last, count in most.items():
                times[last] = times.get(last, 0) + count
        if not seconds:
            return None
        rank = max(seconds, key=lambda one: seconds[one])
        size = len({one for ranks in self._totals.values() for one in ranks})
        if seconds[rank] <= (_BEYOND_CHANCE + 1 / max(1, size)) * sum(seconds.values()):
            return None
        return Straggler(rank, times[rank], calls, seconds[rank])


def _kind(row: CallRow | CallTotals) -> tuple[Any, ...]:
    return row.op, row.name, row.dtype, row.nbytes, row.ranks


class _Recent:
    """The bus bandwidth of one kind of call on one rank, record by record; when there are too many
    values, each two become one.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.values: list[float] = []
        self._calls, self._seconds = 0, 0.0
        self._each, self._waiting = 1, 0

    def take(self, totals: CallTotals) -> None:
        self._waiting += 1
        calls, spent = totals.calls - self._calls, totals.moving_seconds - self._seconds
        if self._waiting < self._each or calls <= 0:
            return
        self._calls, self._seconds, self._waiting = totals.calls, totals.moving_seconds, 0
        value = busbw(totals.op, totals.ranks, totals.nbytes * calls, spent)
        if value is None:
            return
        self.values.append(value)
        if len(self.values) > _RECENT:
            pairs = zip(self.values[::2], self.values[1::2], strict=False)
            self.values = [(one + other) / 2 for one, other in pairs]
            self._each *= 2


def _row_over_ranks(totals: list[CallTotals]) -> CallRow:
    first, count = totals[0], len(totals)
    # The slowest rank ends a call: its bandwidth is that of all.
    mean = [one.busbw_gbps for one in totals]
    best = [one.best_busbw_gbps for one in totals]
    return CallRow(
        op=first.op,
        name=first.name,
        dtype=first.dtype,
        nbytes=first.nbytes,
        ranks=first.ranks,
        calls=max(one.calls for one in totals),
        wait_seconds=sum(one.wait_seconds for one in totals) / count,
        transfer_seconds=sum(one.transfer_seconds for one in totals) / count,
        busbw_gbps=min((one for one in mean if one is not None), default=None),
        best_gbps=min((one for one in best if one is not None), default=None),
    )


#: What a rank is at, in the order of `KINDS`. Start-up is computing before the first step that the
#: cell has logged.
START_UP, IMPORTING, COMPUTING, WAITING, TRANSFER = range(5)

#: Most bins that a page gets for all ranks together, and the most and least for one rank.
_BINS, _MOST_BINS, _LEAST_BINS = 4096, 256, 32
#: More ranks are not drawn.
MOST_RANKS = 128
_KINDS_TOLD = 3
_DIGITS = 4

#: How much of a time was of each kind, in the order of :data:`KINDS`.
Shares = tuple[float, ...]


@dataclass(frozen=True)
class RankTime:
    """One rank's time in a cell, in bins of ``width`` seconds; the last one may not be full."""

    rank: int
    seconds: float
    width: float
    #: Seconds of each kind in each bin.
    bins: tuple[Shares, ...]
    #: The rank that it waited for longest in each bin; -1 if it did not wait.
    whom: tuple[int, ...]
    waits: tuple[tuple[int, float], ...]
    importing: tuple[tuple[str, float], ...]
    steps: tuple[float, ...]

    @property
    def sums(self) -> Shares:
        # Together they are `seconds`.
        return _summed(self.bins)

    def between(self, began: float, ended: float) -> Shares:
        """Returns the seconds of each kind between two times; of a bin in part, that part."""
        found = []
        for at, shares in enumerate(self.bins):
            start, length = at * self.width, sum(shares)
            inside = max(0.0, min(ended, start + self.width) - max(began, start))
            part = inside / self.width if length else 0.0
            found.append(tuple(value * part for value in shares))
        return _summed(found)


@dataclass(frozen=True)
class StepTime:
    """What a step took a rank, as a mean over ``steps`` of them."""

    rank: int
    steps: float
    each: Shares


@dataclass
class _RankStrip:
    """What one rank has sent so far, bin by bin: shares of each kind, and the awaited rank."""

    record: Strip
    shares: list[bytes]
    whom: array[int]
    #: The first bin that has changed since the last message to a page.
    unsent: int | None = 0


class Strips:
    """The time of every rank in one cell; ``ranks`` is their number."""

    def __init__(self, ranks: int = 1) -> None:
        #: The number of bins of a rank that a page gets.
        self.bins = _MOST_BINS
        while self.bins > _LEAST_BINS and self.bins * min(ranks, MOST_RANKS) > _BINS:
            self.bins //= 2
        self._told: dict[int, _RankStrip] = {}
        self._times: list[RankTime] = []

    def __bool__(self) -> bool:
        return bool(self._told)

    @property
    def changed(self) -> bool:
        # Whether pages lack a change.
        return any(told.unsent is not None for told in self._told.values())

    def seconds(self, rank: int) -> float:
        # The time of the cell up to which a rank has reported.
        told = self._told.get(rank)
        return told.record.seconds if told is not None else 0.0

    def take(self, record: Strip, payloads: Sequence[bytes]) -> None:
        # All bins of a rank, or those that have changed.
        shares, whom = payloads
        count, first = len(shares) // _KINDS_TOLD, record.first
        kinds = [shares[kind * count : (kind + 1) * count] for kind in range(_KINDS_TOLD)]
        told, ranks = self._told.get(record.rank), array("h", whom)
        if first:
            if told is None or told.record.width_seconds != record.width_seconds:
                return  # the next report after a new request is complete
            kinds = [old[:first] + new for old, new in zip(told.shares, kinds, strict=True)]
            ranks = told.whom[:first] + ranks
            unsent = first if told.unsent is None else min(first, told.unsent)
        self._told[record.rank] = _RankStrip(record, kinds, ranks, unsent if first else 0)
        self._times.clear()

    def news(self) -> dict[str, Any]:
        # The changes since the last time.
        changed = [(one, one.unsent) for one in self._told.values() if one.unsent is not None]
        for told, _ in changed:
            told.unsent = None
        return self._page(changed)

    def everything(self) -> dict[str, Any]:
        return self._page((told, 0) for told in self._told.values())

    def _page(self, told: Iterable[tuple[_RankStrip, int]]) -> dict[str, Any]:
        rows, bins = [], b""
        shown = set(sorted(self._told)[:MOST_RANKS])
        for one, first in sorted(told, key=lambda pair: pair[0].record.rank):
            record = one.record
            if record.rank not in shown:
                continue
            each = 1
            while len(one.whom) > each * self.bins:
                each *= 2
            # Merged bins are sent as a whole, because a changed bin changes its merged one.
            first = first if each == 1 else 0
            shares = [_joined(kind[first:], each) for kind in one.shares]
            width = record.width_seconds * each
            rows.append(
                [record.rank, first, len(shares[0]), width, round(record.seconds, _DIGITS)]
                + [[round(value, _DIGITS) for value in record.steps]]
                + [[[name, round(value, _DIGITS)] for name, value in pairs]
                   for pairs in (record.waits, record.importing)]
            )  # fmt: skip
            bins += b"".join(shares) + _joined_whom(one, first, each)
        return {"rows": rows, "bins": base64.b64encode(bins).decode("ascii")}

    def by_rank(self) -> list[RankTime]:
        if not self._times:
            self._times = [
                _rank_time(told.record, b"".join(told.shares), told.whom)
                for _, told in sorted(self._told.items())
            ]
        return list(self._times)

    def steps(self) -> list[StepTime]:
        # The mean step of each rank that has logged two or more.
        found = []
        for time in self.by_rank():
            if len(time.steps) == 4 and time.steps[2] > time.steps[0]:
                first, first_at, last, last_at = time.steps
                part = 1 / (last - first)
                before, *sums = (value * part for value in time.between(first_at, last_at))
                # The bin of the first step contains both.
                sums[COMPUTING - 1] += before
                found.append(StepTime(time.rank, last - first, (0.0, *sums)))
        return found


def _joined(shares: bytes, each: int) -> bytes:
    if each == 1:
        return shares
    return bytes(round(sum(shares[at : at + each]) / each) for at in range(0, len(shares), each))


def _joined_whom(told: _RankStrip, first: int, each: int) -> bytes:
    if each == 1:
        return told.whom[first:].tobytes()
    waiting = told.shares[1]
    found = array("h")
    for at in range(0, len(waiting), each):
        # The bin with the longest wait decides: ranks have no mean.
        most = max(range(at, min(at + each, len(waiting))), key=lambda one: waiting[one])
        found.append(told.whom[most])
    return found.tobytes()


def _rank_time(record: Strip, shares: bytes, whom: Sequence[int]) -> RankTime:
    count = len(shares) // 3
    first_at = record.steps[1] if record.steps else 0.0
    bins = []
    for at in range(count):
        start = at * record.width_seconds
        # The cell ends within its last bin.
        length = max(0.0, min(record.width_seconds, record.seconds - start))
        said = [shares[kind * count + at] / 255 * record.width_seconds for kind in range(3)]
        busy = sum(said)
        # Calls of several threads at once take more than the time that there is.
        scale = min(1.0, length / busy) if busy else 1.0
        importing, waiting, transfer = (value * scale for value in said)
        rest = max(0.0, length - importing - waiting - transfer)
        before = min(rest, max(0.0, first_at - start)) if first_at else 0.0
        bins.append((before, importing, rest - before, waiting, transfer))
    return RankTime(
        record.rank,
        record.seconds,
        record.width_seconds,
        tuple(bins),
        tuple(whom),
        tuple((rank, seconds) for rank, seconds in record.waits),
        tuple((module, seconds) for module, seconds in record.importing),
        record.steps,
    )


def _summed(bins: Sequence[Shares]) -> Shares:
    return tuple(map(sum, zip(*bins, strict=True))) if bins else (0.0,) * len(KINDS)
