"""Merges the lines of several ranks into rows: per rank in order, identical lines once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
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
    left = {rank: Counter(lines[rank]) for rank in sorted(lines)}
    #: How many ranks have still to write each line.
    owners = Counter(line for counts in left.values() for line in counts)
    coming = {rank: iter(lines[rank]) for rank in left}
    #: By the next line of each rank, whose it is.
    heads: dict[Line, list[int]] = {}
    #: Those that nobody else is still to write, that of the lowest rank first.
    ready: list[tuple[int, Line]] = []

    def advance(ranks: Iterable[int]) -> None:
        seen = set()
        for rank in ranks:
            for line in islice(coming[rank], 1):
                heads.setdefault(line, []).append(rank)
                seen.add(line)
        for line in seen:
            if len(heads[line]) == owners[line]:
                heappush(ready, (min(heads[line]), line))

    rows: list[Row] = []
    advance(left)
    while heads:
        # Where orders cross, the widest agreement goes first.
        line = heappop(ready)[1] if ready else max(heads, key=lambda head: _width(heads[head]))
        ranks = sorted(heads.pop(line))
        rows.append(Row(tuple(ranks), line))
        for rank in ranks:
            left[rank][line] -= 1
            owners[line] -= not left[rank][line]
        advance(ranks)
    return rows


def _width(ranks: Sequence[int]) -> tuple[int, int]:
    return len(ranks), -min(ranks)
