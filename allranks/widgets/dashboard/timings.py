"""What the ranks' collectives cost: waiting and transfer, by rank and by call; the straggler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from allranks.records.ranks import label
from allranks.records.telemetry import CallTotals, Timings, busbw
from allranks.widgets.dashboard.tables import Table, gbps, nbytes, seconds

_ROWS = 100
_TABLE_CALLS, _TABLE_RANKS = 20, 16


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
    """The rank for which the others waited longest.

    ``seconds`` are those of all other ranks together; it was last in ``times`` of ``calls`` calls.
    """

    rank: int
    times: int
    calls: int
    seconds: float


class TimingTable:
    """The totals of every rank's calls in one cell."""

    def __init__(self) -> None:
        self._totals: dict[tuple[Any, ...], dict[int, CallTotals]] = {}
        self.changed = False

    def __bool__(self) -> bool:
        return bool(self._totals)

    def take(self, record: Timings) -> None:
        """Takes in the totals of one rank that have changed."""
        for row in record.rows:
            totals = CallTotals.from_row(row)
            self._totals.setdefault(totals.key, {})[record.rank] = totals
        self.changed = True

    def by_call(self) -> list[CallRow]:
        """Returns one row for every kind of call, the costliest first."""
        rows = [_merged(list(ranks.values())) for ranks in self._totals.values()]
        return sorted(rows, key=lambda row: -(row.wait_seconds + row.transfer_seconds))

    def by_rank(self) -> list[RankRow]:
        """Returns one row a rank."""
        sums: dict[int, list[Any]] = {}
        for ranks in self._totals.values():
            for rank, totals in ranks.items():
                row = sums.setdefault(rank, [0, 0.0, 0.0])
                row[0] += totals.calls
                row[1] += totals.wait_seconds
                row[2] += totals.transfer_seconds
        return [RankRow(rank, *row) for rank, row in sorted(sums.items())]

    def straggler(self) -> Straggler | None:
        """Returns the rank that cost the others most; None where none did."""
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
        return Straggler(rank, times[rank], calls, seconds[rank]) if seconds[rank] else None

    def told(self) -> dict[str, Any]:
        """Returns what a page shows as JSON carries it, each row with its names."""
        straggler = self.straggler()
        return {
            "ranks": [vars(row) for row in self.by_rank()],
            "calls": [vars(row) for row in self.by_call()[:_ROWS]],
            "straggler": vars(straggler) if straggler else None,
        }


def _merged(totals: list[CallTotals]) -> CallRow:
    first, count = totals[0], len(totals)
    calls = max(one.calls for one in totals)
    moving = sum(one.moving_seconds for one in totals) / count
    # The slowest rank ends a call: its bandwidth is that of all.
    best = [one.best_busbw_gbps for one in totals]
    return CallRow(
        op=first.op,
        name=first.name,
        dtype=first.dtype,
        nbytes=first.nbytes,
        ranks=first.ranks,
        calls=calls,
        wait_seconds=sum(one.wait_seconds for one in totals) / count,
        transfer_seconds=sum(one.transfer_seconds for one in totals) / count,
        busbw_gbps=busbw(first.op, first.ranks, first.nbytes * calls, moving),
        best_gbps=min((one for one in best if one is not None), default=None),
    )


def rank_table(timings: TimingTable) -> Table:
    """Returns what every rank waited and transferred."""
    rows = timings.by_rank()
    told = [
        [f"rank {r.rank}", f"{r.calls:,}", seconds(r.wait_seconds), seconds(r.transfer_seconds)]
        for r in rows[:_TABLE_RANKS]
    ]
    if len(rows) > _TABLE_RANKS:
        rest = rows[_TABLE_RANKS:]
        wait = sum(row.wait_seconds for row in rest) / len(rest)
        transfer = sum(row.transfer_seconds for row in rest) / len(rest)
        calls = max(row.calls for row in rest)
        name = f"{label(row.rank for row in rest)}, mean"
        told.append([name, f"{calls:,}", seconds(wait), seconds(transfer)])
    return Table("collectives", ["", "calls", "waiting", "transfer"], told, straggler(timings))


def call_table(timings: TimingTable) -> Table:
    """Returns every kind of call, the costliest first; seconds are means over ranks."""
    rows = timings.by_call()
    told = [
        [
            f"{row.op} {row.name}",
            f"{row.calls:,} × {nbytes(row.nbytes)}",
            seconds(row.wait_seconds),
            seconds(row.transfer_seconds),
            gbps(row.busbw_gbps),
            gbps(row.best_gbps),
        ]
        for row in rows[:_TABLE_CALLS]
    ]
    head = ["", "calls", "waiting", "transfer", "busbw", "best"]
    more = f"{len(rows) - _TABLE_CALLS} more kinds of calls" if len(rows) > _TABLE_CALLS else ""
    return Table("", head, told, more)


def straggler(timings: TimingTable) -> str:
    """Returns the sentence that names the rank the others waited for; empty where none did."""
    found = timings.straggler()
    if found is None:
        return ""
    return (
        f"rank {found.rank} came last in {found.times:,} of {found.calls:,} calls: the others "
        f"waited {seconds(found.seconds)} for it in total"
    )
