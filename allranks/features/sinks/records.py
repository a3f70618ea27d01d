"""What the two sides of a trace say to each other. Standard library only."""

from __future__ import annotations

from typing import Any, NamedTuple

from allranks.records.frozen import frozen
from allranks.records.wire import Record


@frozen
class TraceCells(Record):
    """Report the calls of all following cells."""


class TracedCall(NamedTuple):
    """One collective call. Times are in seconds since 1970; ``complete``: all ranks were there."""

    op: str
    line: str
    nbytes: int
    dtype: str
    group_size: int
    transport: str
    began: float
    complete: float
    ended: float
    wait_seconds: float
    last_rank: int


@frozen
class TracedCalls(Record):
    """The calls of one rank in a cell since the last such record.

    ``began`` and ``ended`` are the cell's, by the clock of the rank's host; ``ended`` is 0 while it
    runs. ``calls`` holds each `TracedCall` as a list. ``left_out`` counts calls that came too fast.
    """

    rank: int
    cell: int
    label: str
    host: str
    began: float
    ended: float
    calls: tuple[list[Any], ...]
    left_out: int
