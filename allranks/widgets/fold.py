"""Merges the lines of several ranks into rows: per rank in order, identical lines once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from allranks.widgets.bars import combined, may_be_bar, name_of


class Line(NamedTuple):
    """One line of one rank. ``kind`` is out, err, value or note."""

    kind: str
    text: str


class Row(NamedTuple):
    """One line that these ranks wrote."""

    ranks: tuple[int, ...]
    line: Line


def merge(lines: Mapping[int, Sequence[Line]]) -> list[Row]:
    """Returns the rows of several ranks' lines.

    Every rank's lines stay in their order. A line waits for the ranks that are still to write it,
    so that the rows do not depend on who was faster. Progress bars of the same name are one line.

    Args:
        lines: the lines of each rank.
    """
    if not any(may_be_bar(line.text) for some in lines.values() for line in some):
        return _merged(lines)
    named = {rank: [Line(kind, name_of(text)) for kind, text in lines[rank]] for rank in lines}
    rows = []
    at = dict.fromkeys(lines, 0)
    for ranks, line in _merged(named):
        own = [lines[rank][at[rank]] for rank in ranks]
        if own[0].text is not line.text:
            line = Line(line.kind, combined([one.text for one in own], ranks))
        for rank in ranks:
            at[rank] += 1
        rows.append(Row(ranks, line))
    return rows


def _merged(lines: Mapping[int, Sequence[Line]]) -> list[Row]:
    at = dict.fromkeys(sorted(lines), 0)
    left = {rank: _counts(lines[rank]) for rank in at}
    owners: dict[Line, set[int]] = {}
    for rank, counts in left.items():
        for line in counts:
            owners.setdefault(line, set()).add(rank)
    rows: list[Row] = []
    while True:
        heads: dict[Line, list[int]] = {}
        for rank, index in at.items():
            if index < len(lines[rank]):
                heads.setdefault(lines[rank][index], []).append(rank)
        if not heads:
            return rows
        # Nobody else is still to write it; else orders cross, and the widest agreement goes first.
        ready = [line for line, holders in heads.items() if len(owners[line]) == len(holders)]
        line = ready[0] if ready else max(heads, key=lambda head: len(heads[head]))
        rows.append(Row(tuple(heads[line]), line))
        for rank in heads[line]:
            at[rank] += 1
            left[rank][line] -= 1
            if not left[rank][line]:
                owners[line].discard(rank)


def _counts(lines: Sequence[Line]) -> dict[Line, int]:
    counts: dict[Line, int] = {}
    for line in lines:
        counts[line] = counts.get(line, 0) + 1
    return counts
