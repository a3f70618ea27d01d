"""Tables of curves and timings, and numbers as text: 0.0123, 1.5 ms, 4 MB."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from allranks.records.config import size_text
from allranks.records.ranks import label
from allranks.widgets.dashboard.curves import Curves
from allranks.widgets.dashboard.timings import RankTime, Shares, Strips, TimingTable
from allranks.widgets.palette import KINDS


@dataclass(frozen=True)
class Table:
    """Rows of text under a head; columns of words stand to the left, those of numbers right."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""
    words: tuple[int, ...] = (0,)

    def text(self) -> str:
        every = [self.head, *self.rows]
        widths = [max(len(row[i]) for row in every) for i in range(len(self.head))]
        lines = [self.title] if self.title else []
        for row in every:
            cells = [
                cell.ljust(width) if i in self.words else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])


def number(value: float, digits: int = 4) -> str:
    """Returns a number with some digits, as ``0.01234`` or ``1.5e-7``."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    shown = f"{value:,.{digits}g}"
    head, e, power = shown.partition("e")
    return f"{head}e{int(power)}" if e else shown


def labels(values: Sequence[float]) -> list[str]:
    """Returns different numbers as different words, with as few digits as that takes."""
    for digits in range(4, 17):
        words = [number(value, digits) for value in values]
        if len(set(words)) == len(set(values)):
            break
    # One notation: where one number has an exponent, all have.
    return [_with_exponent(value) for value in values] if any("e" in w for w in words) else words


def _with_exponent(value: float) -> str:
    head, _, power = f"{value:.11e}".partition("e")
    return f"{float(head):.12g}e{int(power)}" if value else "0"


def seconds(value: float) -> str:
    """Returns a duration, as ``12.3 s``, ``4.5 ms`` or ``67 µs``."""
    if value >= 60:
        return f"{int(value // 60)} min {value % 60:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.0f} µs"


def seconds_like(value: float, most: float) -> str:
    """Returns a duration of a column whose longest is ``most``: all have the same unit."""
    if most >= 60:
        whole = round(value)
        return f"{whole // 60} min {whole % 60:02d} s"
    unit, size = next(
        ((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if most >= size), ("µs", 1e-6)
    )
    decimals = sum(most < bound * size for bound in (10, 100))
    return f"{value / size:.{decimals}f} {unit}"


def gbps(value: float | None) -> str:
    return "n/a" if value is None else f"{size_text(value * 1e9)}/s"


#: Rows and columns of the table of curves.
_TABLE_CURVES, _CURVE_RANKS = 40, 16


def curve_table(curves: Curves, noun: str = "rank") -> Table:
    """Returns the last value of every curve, with mean, least and greatest over ranks."""
    groups: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}
    for key, series in curves.series.items():
        groups.setdefault((key.name, key.member), {})[key.rank] = series.last
    ranks = sorted({key.rank for key in curves.series})
    shown = ranks if len(ranks) <= _CURVE_RANKS and len(ranks) > 1 else []
    head = ["last value", "step", "mean", "min", "max", *(f"{noun} {rank}" for rank in shown)]
    rows = []
    for (name, member), lasts in list(groups.items())[:_TABLE_CURVES]:
        values = [value for _, value in lasts.values()]
        row = [f"{name} {member}".strip(), number(max(step for step, _ in lasts.values()))]
        row += [number(sum(values) / len(values)), number(min(values)), number(max(values))]
        rows.append(row + [number(lasts[r][1]) if r in lasts else "" for r in shown])
    wrong = {name: curves.broken(name, noun) for name in dict.fromkeys(name for name, _ in groups)}
    notes = [f"{name}: {said}" for name, said in list(wrong.items())[:_TABLE_CURVES] if said]
    if len(groups) > _TABLE_CURVES:
        notes.append(f"{len(groups) - _TABLE_CURVES} more curves are not in this table")
    if curves.dropped:
        count = sum(curves.dropped.values())
        notes.append(f"{count:,} values of {label(curves.dropped)} came too fast to be kept")
    if curves.unkept:
        notes.append(f"{curves.unkept:,} values of too many different curves were not kept")
    return Table("curves", head, rows, "; ".join(notes))


_TABLE_CALLS, _TABLE_RANKS, _PAGE_CALLS = 20, 16, 100
#: Of the costliest calls, the bandwidth is sent part by part.
_SPARKLINES = 10


#: The greatest value has this number of parts; fewer where too many rows would be left.
_PARTS = (50, 10, 4)


_Row = TypeVar("_Row")


def alike(
    rows: Sequence[_Row],
    most: int,
    values: Callable[[_Row], Sequence[float]],
    words: Callable[[_Row], str] = lambda _: "",
) -> list[list[_Row]]:
    """Returns the rows in groups whose values hardly differ, if there are more than ``most``.

    The ``words`` of a group are the same.
    """
    groups = [[row] for row in rows]
    greatest = max((value for row in rows for value in values(row)), default=0.0) or 1.0
    for parts in _PARTS:
        if len(groups) <= most:
            break
        found: dict[tuple[str | int, ...], list[_Row]] = {}
        for row in rows:
            shares = (round(value / greatest * parts) for value in values(row))
            found.setdefault((words(row), *shares), []).append(row)
        groups = [*found.values()]
    return groups


def row_name(ranks: Sequence[int]) -> str:
    """Returns the name of a row: its ranks, and that its values are their means."""
    return f"{label(ranks)}{', mean' * (len(ranks) > 1)}"


def rank_table(timings: TimingTable) -> Table:
    rows = timings.by_rank()
    told = []
    for group in alike(rows, _TABLE_RANKS, lambda row: (row.wait_seconds, row.transfer_seconds)):
        calls = max(row.calls for row in group)
        means = (fmean(row.wait_seconds for row in group), fmean(r.transfer_seconds for r in group))
        name = row_name([row.rank for row in group])
        told.append([name, f"{calls:,}", *map(seconds, means)])
    return Table("communication", ["", "calls", "waiting", "transfer"], told, straggler(timings))


def call_table(timings: TimingTable) -> Table:
    # The costliest call first.
    rows = timings.by_call()
    told = [
        [
            f"{row.op} {row.name}",
            f"{row.calls:,} × {size_text(row.nbytes)}",
            seconds(row.wait_seconds),
            seconds(row.transfer_seconds),
            gbps(row.busbw_gbps),
            gbps(row.best_gbps),
        ]
        for row in rows[:_TABLE_CALLS]
    ]
    # Of all these calls together.
    head = ["", "calls", "total waiting", "total transfer", "busbw", "best"]
    more = f"{len(rows) - _TABLE_CALLS} more kinds of calls" if len(rows) > _TABLE_CALLS else ""
    return Table("", head, told, more)


def timings_page(timings: TimingTable) -> dict[str, Any]:
    # JSON types only.
    return {
        "ranks": [vars(row) for row in timings.by_rank()],
        "calls": [
            {**vars(row), "recent": timings.recent(row) if place < _SPARKLINES else []}
            for place, row in enumerate(timings.by_call()[:_PAGE_CALLS])
        ],
        "cause": timings.cause,
        "straggler": straggler(timings),
    }


def straggler(timings: TimingTable) -> str:
    """Returns the sentence that names the rank the others waited for; empty where none did."""
    found = timings.straggler()
    if found is None:
        return ""
    return (
        f"rank {found.rank} came last in {found.times:,} of {found.calls:,} calls: the others "
        f"together waited {seconds(found.seconds)} for it"
    )


_NAMED = 3
#: Waits that are shorter than this part of the longest are not named.
_WORTH = 0.1


def strip_tables(strips: Strips) -> list[Table]:
    every, steps = strips.by_rank(), strips.steps()
    with_seconds = len(every) <= _TABLE_RANKS
    rows = [((time.rank,), time.sums, _why(time, with_seconds)) for time in every]
    found = [_time_table("time of each rank", rows)]
    if steps:
        title = f"a step, mean of {number(max(step.steps for step in steps))}"
        found.append(_time_table(title, [((step.rank,), step.each, "") for step in steps]))
    return found


#: Ranks, their seconds of each kind, and why.
_TimeRow = tuple[tuple[int, ...], Shares, str]


def _merged(rows: list[_TimeRow]) -> _TimeRow:
    # Their means.
    sums = tuple(map(fmean, zip(*(sums for _, sums, _ in rows), strict=True)))
    return tuple(rank for ranks, *_ in rows for rank in ranks), sums, rows[0][2]


def _time_table(title: str, every: Sequence[_TimeRow]) -> Table:
    groups = [
        _merged(group) for group in alike(every, _TABLE_RANKS, lambda r: r[1], lambda r: r[2])
    ]
    rows, left = groups[:_TABLE_RANKS], groups[_TABLE_RANKS:]
    note = f"{label(r for ranks, *_ in left for r in ranks)} not in this table" if left else ""
    # A kind in which no rank spent time has no column.
    kinds = [kind for kind in range(len(KINDS)) if any(sums[kind] for _, sums, _ in rows)]
    most = max((sum(sums) for _, sums, _ in rows), default=0.0)
    whys = any(why for *_, why in rows)
    told = [
        [
            row_name(ranks),
            seconds_like(sum(sums), most),
            *(seconds_like(sums[kind], most) for kind in kinds),
            *([why] if whys else []),
        ]
        for ranks, sums, why in rows
    ]
    head = ["", "all", *(KINDS[kind] for kind in kinds), *([""] if whys else [])]
    return Table(title, head, told, note, words=(0, len(head) - 1) if whys else (0,))


def _why(time: RankTime, with_seconds: bool) -> str:
    said = []
    waits = [(f"rank {rank}", value) for rank, value in time.waits if rank >= 0]
    for what, pairs in (("waits for", waits), ("imports", time.importing)):
        longest = max((value for _, value in pairs), default=0.0)
        named = [
            f"{name} {seconds(value)}" if with_seconds else name
            for name, value in pairs[:_NAMED]
            if value >= _WORTH * longest and value >= 0.01 * time.seconds
        ]
        if named:
            said.append(f"{what} {', '.join(named)}")
    return "; ".join(said)
