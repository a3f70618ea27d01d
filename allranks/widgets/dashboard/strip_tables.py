"""Where each rank's time went, in tables: of the cell, and of a step."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.records.ranks import label
from allranks.widgets.dashboard.numbers import number, seconds, seconds_like
from allranks.widgets.dashboard.strips import KINDS, RankTime, Shares, Strips
from allranks.widgets.dashboard.table import Table

_RANKS = 16
_NAMED = 3
#: Waits that are shorter than this part of the longest are not named.
_WORTH = 0.1


def strip_tables(strips: Strips) -> list[Table]:
    """Returns the tables that have something in them."""
    times, steps = strips.by_rank()[:_RANKS], strips.steps()[:_RANKS]
    found = [_table("time", [(time.rank, time.sums, _why(time)) for time in times])]
    if steps:
        count = number(max(step.steps for step in steps))
        title = f"a step, mean of {count}"
        found.append(_table(title, [(step.rank, step.each, "") for step in steps]))
    left = strips.by_rank()[_RANKS:]
    if left:
        found[0] = Table(*_parts(found[0]), note=f"{label(t.rank for t in left)} not in this table")
    return found


def _parts(table: Table) -> tuple[str, list[str], list[list[str]]]:
    return table.title, table.head, table.rows


def _table(title: str, rows: Sequence[tuple[int, Shares, str]]) -> Table:
    """Returns a table without the kinds that nobody has spent time in."""
    kinds = [kind for kind in range(len(KINDS)) if any(sums[kind] for _, sums, _ in rows)]
    most = max((sum(sums) for _, sums, _ in rows), default=0.0)
    whys = any(why for *_, why in rows)
    told = [
        [
            f"rank {rank}",
            seconds_like(sum(sums), most),
            *(seconds_like(sums[kind], most) for kind in kinds),
            *([why] if whys else []),
        ]
        for rank, sums, why in rows
    ]
    head = ["", "all", *(KINDS[kind] for kind in kinds), *([""] if whys else [])]
    words = (0, len(head) - 1) if whys else (0,)
    return Table(title, head, told, words=words)


def _why(time: RankTime) -> str:
    """Returns for whom a rank waited most, and what it imported."""
    said = []
    waits = [(f"rank {rank}", value) for rank, value in time.waits if rank >= 0]
    for what, pairs in (("waits for", waits), ("imports", time.importing)):
        longest = max((value for _, value in pairs), default=0.0)
        named = [
            f"{name} {seconds(value)}"
            for name, value in pairs[:_NAMED]
            if value >= _WORTH * longest and value >= 0.01 * time.seconds
        ]
        if named:
            said.append(f"{what} {', '.join(named)}")
    return "; ".join(said)
