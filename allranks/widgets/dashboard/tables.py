"""What a dashboard says in tables: for text/plain, for the still picture and for screen readers."""

from __future__ import annotations

from allranks.records.ranks import label
from allranks.widgets.dashboard.curves import Curves
from allranks.widgets.dashboard.figures import Figures
from allranks.widgets.dashboard.numbers import gbps, nbytes, number, seconds
from allranks.widgets.dashboard.strip_tables import strip_tables
from allranks.widgets.dashboard.table import Table as Table
from allranks.widgets.dashboard.timings import TimingTable

_CURVES = 40
_CALLS = 20
_RANKS = 16


def summary(figures: Figures) -> str:
    """Returns one line: which ranks, how they are, for how long."""
    if figures.title:
        return figures.title
    return f"{label(figures.ranks)}: {figures.tiles.said()}, {seconds(figures.elapsed)}"


def tables(figures: Figures) -> list[Table]:
    """Returns the tables that have something in them."""
    found = []
    if figures.curves:
        found.append(curve_table(figures.curves, figures.noun))
    found += time_tables(figures)
    if figures.timings:
        found.append(rank_table(figures.timings))
        found.append(call_table(figures.timings))
    return found


def time_tables(figures: Figures) -> list[Table]:
    """Returns where the ranks' time and memory went."""
    times = strip_tables(figures.strips) if figures.strips else []
    return [*times, *figures.memory.tables()]


def text(figures: Figures) -> str:
    """Returns all of it as text."""
    return "\n".join([summary(figures), *(table.text() for table in tables(figures))])


def curve_table(curves: Curves, noun: str = "rank") -> Table:
    """Returns the last value of every curve, with mean, least and greatest over ranks."""
    groups: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}
    for key, series in curves.series.items():
        groups.setdefault((key.name, key.member), {})[key.rank] = series.last
    ranks = sorted({key.rank for key in curves.series})
    shown = ranks if len(ranks) <= _RANKS and len(ranks) > 1 else []
    head = ["last value", "step", "mean", "min", "max", *(f"{noun} {rank}" for rank in shown)]
    rows = []
    for (name, member), lasts in list(groups.items())[:_CURVES]:
        values = [value for _, value in lasts.values()]
        row = [f"{name} {member}".strip(), number(max(step for step, _ in lasts.values()))]
        row += [number(sum(values) / len(values)), number(min(values)), number(max(values))]
        rows.append(row + [number(lasts[r][1]) if r in lasts else "" for r in shown])
    notes = []
    if len(groups) > _CURVES:
        notes.append(f"{len(groups) - _CURVES} more curves are not in this table")
    if curves.dropped:
        count = sum(curves.dropped.values())
        notes.append(f"{count:,} values of {label(curves.dropped)} came too fast to be kept")
    if curves.unkept:
        notes.append(f"{curves.unkept:,} values of too many different curves were not kept")
    return Table("curves", head, rows, "; ".join(notes))


def rank_table(timings: TimingTable) -> Table:
    """Returns what every rank waited and transferred."""
    rows = timings.by_rank()
    told = [
        [f"rank {r.rank}", f"{r.calls:,}", seconds(r.wait_seconds), seconds(r.transfer_seconds)]
        for r in rows[:_RANKS]
    ]
    if len(rows) > _RANKS:
        rest = rows[_RANKS:]
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
        for row in rows[:_CALLS]
    ]
    head = ["", "calls", "waiting", "transfer", "busbw", "best"]
    more = f"{len(rows) - _CALLS} more kinds of calls" if len(rows) > _CALLS else ""
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
