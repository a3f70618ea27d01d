"""The states of many ranks in few lines: ranks in the same state are one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allranks.cluster.failures import RankStatus
from allranks.records.ranks import compact, counted

#: More ranks than these have a row for each group.
MOST_ROWS = 8


def summary(statuses: Sequence[RankStatus]) -> str:
    """Returns how many ranks are in each state: ``31 running; 27 wait for rank 13``."""
    return "; ".join(counted({one.rank: one.doing for one in statuses}))


def are_busy(statuses: Sequence[RankStatus]) -> bool:
    """Whether some rank runs a cell, or a request of any client."""
    return any(one.doing.state.is_busy for one in statuses)


def rows(statuses: Sequence[RankStatus]) -> list[dict[str, Any]]:
    """Returns a row for each rank, or for each group of more than `MOST_ROWS` ranks.

    A group has one host, device, state and line.
    """
    groups: dict[object, list[RankStatus]] = {}
    for one in statuses:
        alike = (one.host, one.device, one.state, one.line)
        key = alike if len(statuses) > MOST_ROWS else one.rank
        groups.setdefault(key, []).append(one)
    return [_row(group) for group in groups.values()]


def _row(group: list[RankStatus]) -> dict[str, Any]:
    first = group[0]
    state = first.doing.state
    detail = first.state.removeprefix(state.word).strip()
    memory = [one.rss_nbytes for one in group]
    return {
        "ranks": compact(one.rank for one in group),
        "processes": ", ".join(str(one.pid) for one in group),
        "host": first.host,
        "device": first.device,
        "nbytes": [min(memory), max(memory)],
        "state": state.word,
        "detail": " · ".join(filter(None, [detail, first.line])),
        "is_bad": state.look == "bad",
    }
