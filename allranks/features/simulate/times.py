"""The simulated time of a cell, for the panel and in one line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple
from operator import itemgetter

from allranks.collectives.calls.journal import named
from allranks.collectives.timings import Spans, Sums
from allranks.features.simulate.events import RankEvent
from allranks.features.simulate.records import SimulatedTime
from allranks.records.telemetry import Strip, Timings
from allranks.records.wire import Record

_WAITS = 8


def time_records(
    cell: int, network: str, size: int, clocks: Sequence[float], events: Sequence[RankEvent]
) -> list[tuple[Record, list[bytes]]]:
    """The totals and the strip of each rank, and the sums over all, in simulated time."""
    found: list[tuple[Record, list[bytes]]] = []
    by_rank: dict[int, list[RankEvent]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event)
    waits = transfers = 0.0
    for rank, mine in by_rank.items():
        wait, transfer = _rank_records(cell, size, clocks[rank], rank, mine, found)
        waits, transfers = waits + wait, transfers + transfer
    end = max(clocks, default=0.0)
    last = max(range(len(clocks)), key=clocks.__getitem__, default=0)
    found.append((SimulatedTime(cell, network, size, end, last, sum(clocks), waits, transfers), []))
    return found


def _rank_records(
    cell: int,
    size: int,
    clock: float,
    rank: int,
    events: Sequence[RankEvent],
    found: list[tuple[Record, list[bytes]]],
) -> tuple[float, float]:
    spans, sums = Spans(0.0), defaultdict[tuple[str, str, str, int, int, str], Sums](Sums)
    waited_seconds = moving_seconds = until = 0.0
    for event in events:
        op, name = event.title.partition("(")[0], named(event.site) if event.site else ""
        moving = event.end - event.ready
        one = sums[op, name, "", event.nbytes, size, "simulated"]
        one.add(event.ready - event.begin, moving, moving, event.peer)
        # The messages of a sendrecv, or posted ones, are on their way at once.
        ready, end = max(event.ready, until), max(event.end, until)
        wait, transfer = ready - max(event.begin, until), end - ready
        spans.call(end, wait, transfer, event.peer)
        waited_seconds, moving_seconds = waited_seconds + wait, moving_seconds + transfer
        until = end
    rows = tuple(list(astuple(one.record(key))) for key, one in sums.items())
    found.append((Timings(rank, cell, rows), []))
    bins = spans.used(clock)
    waited = sorted(([peer, sum(row)] for peer, row in spans.waits.items()), key=itemgetter(1))
    longest, moving = tuple(waited[: -_WAITS - 1 : -1]), sum(spans.transfer)
    strip = Strip(rank, cell, clock, spans.width, (), longest, moving, ())
    found.append((strip, [spans.shares(bins), spans.waited_for(bins)]))
    return waited_seconds, moving_seconds
