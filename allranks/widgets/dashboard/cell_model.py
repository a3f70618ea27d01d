"""All that a dashboard knows of one cell."""

from __future__ import annotations

import time
from collections.abc import Sequence

from allranks.records.telemetry import Points, Pulse, Strip, Telemetry, Timings
from allranks.records.wire import Hello
from allranks.widgets.dashboard.curves import Curves, Logged
from allranks.widgets.dashboard.ranks import Memory, Tiles
from allranks.widgets.dashboard.sections import made_sections
from allranks.widgets.dashboard.time_strips import Strips
from allranks.widgets.dashboard.timings import TimingTable
from allranks.widgets.ensemble.members import MemberTable

#: Collectives are worth a panel when a rank has made so many, and spent so long in them.
_CALLS, _SECONDS = 20, 1.0


class CellModel:
    """What the ranks of a cell have told beside their output.

    Args:
        hellos: the ranks that run the cell.
        members: of an ensemble; then curves are theirs, and each is told by its number.
    """

    def __init__(self, hellos: Sequence[Hello], members: MemberTable | None = None) -> None:
        self.members = members
        self.noun = "rank" if members is None else "member"
        #: Said of it as a whole, in place of how its ranks are.
        self.title = ""
        self.ranks = tuple(hello.rank for hello in hellos)
        self.tiles = Tiles(hellos)
        self.logged = Logged()
        self.curves = Curves(self.logged)
        self.timings = TimingTable()
        self.strips = Strips(len(self.ranks))
        self.memory = Memory()
        self.sections = made_sections(self.ranks) if members is None else []
        self.started = time.monotonic()
        self.seconds: float | None = None

    def take(self, record: Telemetry, payloads: Sequence[bytes]) -> None:
        """Takes in what a rank tells."""
        if isinstance(record, Points):
            self.curves.take(record, payloads[0])
            self.tiles.at_step(record.rank, self.curves.step(record.rank))
        elif isinstance(record, Timings):
            self.timings.take(record)
        elif isinstance(record, Strip):
            self.strips.take(record, payloads)
        elif isinstance(record, Pulse):
            self.tiles.take(record)
            self.memory.take(record, self.elapsed)
        for section in self.sections:
            section.take(record, payloads)

    def end(self) -> None:
        """The cell has ended."""
        self.seconds = time.monotonic() - self.started

    @property
    def elapsed(self) -> float:
        """Seconds that the cell has taken so far, or took."""
        return time.monotonic() - self.started if self.seconds is None else self.seconds

    def worth_showing(self) -> bool:
        """Whether there is something in it that a reader has not asked for in vain."""
        busy = any(
            row.calls >= _CALLS and row.wait_seconds + row.transfer_seconds >= _SECONDS
            for row in self.timings.by_rank()
        )
        return bool(self.curves) or busy or any(one.worth_showing() for one in self.sections)
