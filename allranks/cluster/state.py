"""Which ranks have left a cell, and how: a state that waits for nothing.

Records of the ranks, and the ends of processes, are events for `apply`, which returns what has
changed. An event that comes twice, or too late, changes nothing. Any other object is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from allranks.cluster.failures import ProcessExit
from allranks.records.wire import Died, Hello, Reply, RunCell

#: The status with which a rank leaves a cell that dies in it, and that of a rank once another
#: process has taken its place.
LOST, REPLACED = "lost", "replaced"


@dataclass(frozen=True)
class AllEnded:
    """No rank is left."""


@dataclass(frozen=True)
class Replaced:
    """Another process has taken the place of a rank."""

    rank: int


@dataclass(frozen=True)
class Left:
    """A rank has left a cell. ``status`` is that of its reply, `LOST` or `REPLACED`."""

    rank: int
    status: str


CellEvent = Reply | Died | ProcessExit | Replaced | AllEnded


class CellState:
    """One cell on its ranks. ``left`` has the status of those that have left it, in the order in
    which they have, and ``replies`` their replies, also of a rank whose death was known before.
    """

    def __init__(self, cell: int, ranks: Iterable[int]) -> None:
        self.cell, self.ranks = cell, tuple(ranks)
        self.left: dict[int, str] = {}
        self.replies: dict[int, Reply] = {}
        # In the order of the ranks. It is read at each step of a cell.
        self._pending = dict.fromkeys(self.ranks)

    @property
    def pending(self) -> tuple[int, ...]:
        """The ranks that have not left it yet."""
        return tuple(self._pending)

    def apply(self, event: CellEvent) -> tuple[Left, ...]:
        """Returns the ranks that have left now; those of a `Replaced` had left before."""
        match event:
            case Reply(rank=rank):
                known = rank in self._pending or rank in self.left
                if event.cell != self.cell or rank in self.replies or not known:
                    return ()
                self.replies[rank] = event
                return self._leave([rank], event.status)
            case Died(rank=rank) | ProcessExit(rank=rank):
                return self._leave([rank], LOST)
            case Replaced(rank):
                if self.left.get(rank, REPLACED) == REPLACED:
                    return ()
                self.left[rank] = REPLACED
                return (Left(rank, REPLACED),)
            case AllEnded():
                return self._leave(self.pending, LOST)
        raise TypeError(f"expected an event of a cell, found {event!r:.80}")

    def _leave(self, ranks: Iterable[int], status: str) -> tuple[Left, ...]:
        fresh = [rank for rank in ranks if rank in self._pending]
        for rank in fresh:
            del self._pending[rank]
            self.left[rank] = status
        return tuple(Left(rank, status) for rank in fresh)


class ClusterState:
    """Ranks and the last cell that all or some of them have got.

    ``hellos`` are the reports of their processes, ``dead`` the deaths of ranks that no other
    process has replaced.
    """

    def __init__(self) -> None:
        self.hellos: dict[int, Hello] = {}
        self.dead: dict[int, Died] = {}
        self.cell: CellState | None = None

    def apply(self, event: Hello | RunCell | Reply | Died) -> tuple[Left, ...]:
        """Returns the ranks that have left the cell now."""
        match event:
            case Hello(rank=rank):
                # A process that replaces a rank runs no cell: the rank has left it.
                self.hellos[rank] = event
                self.dead.pop(rank, None)
                return ()
            case RunCell():
                if self.cell is None or self.cell.cell != event.cell:
                    self.cell = CellState(event.cell, event.ranks or sorted(self.hellos))
                    return tuple(left for one in self.dead.values() for left in self._left(one))
                return ()
            case Died(rank=rank):
                self.dead[rank] = event
                return self._left(event)
            case Reply():
                return self._left(event)
        raise TypeError(f"expected an event of the ranks, found {event!r:.80}")

    def _left(self, event: Reply | Died) -> tuple[Left, ...]:
        return self.cell.apply(event) if self.cell is not None else ()
