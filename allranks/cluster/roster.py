"""Which ranks are there, how others have ended, and where the log of each stands."""

from __future__ import annotations

from allranks.cluster import deaths
from allranks.cluster.failures import ending
from allranks.errors import Report
from allranks.records.telemetry import Pulse, Telemetry
from allranks.records.wire import Hello, Output, Prompt, Reply, Result

CellRecord = Output | Prompt | Reply | Result | Telemetry


class Roster:
    """What one cluster's ranks have told of themselves, and what was told of their ends.

    Args:
        size: how many ranks.

    Attributes:
        hellos: what each rank said when it came up.
        ends: what has ended, and cannot be replaced.
        dead: ranks that have died, and whose places others can take.
        fresh: ranks that are new and have come up.
        again: how those have died that had just taken a place.
        lines: the line at which each rank was last, as it told.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.hellos: dict[int, Hello] = {}
        self.ends: list[deaths.End] = []
        self.dead: dict[int, deaths.End] = {}
        self.fresh: set[int] = set()
        self.again: dict[int, deaths.End] = {}
        self.lines: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        """The process that takes the place of each rank that has died, the last to be started."""
        self._sent: dict[int, int] = {}
        """How much of its log each rank has sent."""
        self._ended: dict[int, int] = {}
        """How long each rank's log was when its last cell ended, or it came."""

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come up."""
        return [rank for rank in range(self.size) if rank not in self.hellos]

    @property
    def left(self) -> tuple[int, ...]:
        """The ranks that live."""
        return tuple(rank for rank in range(self.size) if rank not in self.dead)

    @property
    def all_over(self) -> bool:
        """Whether something has ended, and no more ends are to be expected."""
        return deaths.all_over(self.ends, self.size)

    def came(self, hello: Hello) -> None:
        """A rank is up, unless another process was started for its place since."""
        rank = hello.rank
        if hello.pid == self._pids.get(rank, hello.pid):
            self.hellos[rank] = hello
            self.fresh.add(rank)
            self._sent[rank] = self._ended[rank] = deaths.length(hello.log)

    def told(self, record: CellRecord) -> None:
        """A rank has told something of its cell."""
        rank = record.rank
        if isinstance(record, Pulse) and record.line:
            self.lines[rank] = record.line
        if isinstance(record, Output) and record.log_nbytes:
            self._sent[rank] = record.log_nbytes
        if isinstance(record, Reply):
            self._ended[rank] = self._sent.get(rank, 0)

    def replaces(self, rank: int, pid: int) -> None:
        """A process was started to take a rank's place."""
        self._pids[rank] = pid
        self.again.pop(rank, None)

    def is_old(self, end: deaths.End) -> bool:
        """Whether it is left from a replacement that did not succeed."""
        return end.pid != self._pids.get(end.rank, end.pid)

    def died(self, end: deaths.End) -> bool:
        """A rank has died that can be replaced; returns whether its place was vacant already.

        Where it was the last one the cluster has ended: nobody has kept anything.
        """
        self.fresh.discard(end.rank)
        again = end.rank in self.dead
        (self.again if again else self.dead)[end.rank] = end
        if not self.left:
            self.ends += self.dead.values()
        return again

    def unseen(self, rank: int) -> str:
        """Returns the text that a rank wrote and did not get to send."""
        return deaths.unseen(self.hellos[rank].log, self._sent.get(rank, 0))

    def last_words(self, rank: int) -> str:
        """Returns the end of what a rank has written since its last cell."""
        return deaths.tail(self.hellos[rank].log, self._ended.get(rank, 0))

    def how(self, end: deaths.End) -> str:
        """Returns how a rank died, in words that follow its name."""
        return deaths.how(end, self.lines.get(end.rank, ""), self.last_words(end.rank))

    def report(self, end: deaths.End) -> Report:
        """Returns the report of a cell on a rank that died in it, and its last words."""
        line, words = self.lines.get(end.rank, ""), self.last_words(end.rank)
        return deaths.report(end, self.hellos[end.rank], line, words)

    def obituary(self) -> str:
        """Returns which ranks have died and were not replaced, and how."""
        return "; ".join(
            f"rank {rank} ({self.hellos[rank].host}, pid {self.hellos[rank].pid}) "
            f"{ending(end.code, end.memory)}"
            for rank, end in sorted(self.dead.items())
        )
