"""Which ranks run, which have died, what they run, which have left it, and in which epoch they are:
states that wait for nothing.

Records of the ranks, and the ends of processes, are events for `apply`, which returns what has
changed. A reply or a death that comes twice, or too late, changes nothing. Any other object is
refused. What this notebook does is a method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from allranks.cluster.failures import ProcessExit
from allranks.records.agent import Replaces
from allranks.records.ranks import label
from allranks.records.wire import Died, EpochBegun, EpochEnded, Hello, Reply, RunCell

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
        # In the order of the ranks.
        self._pending = dict.fromkeys(self.ranks)
        self.pending = tuple(self._pending)
        """The ranks that have not left it yet. It is read at each step of a cell."""

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
        self.pending = tuple(self._pending)
        return tuple(Left(rank, status) for rank in fresh)


def _replies(cell: CellState | None) -> list[tuple[int, Reply]]:
    # A copy: other threads read it while one applies events.
    return [] if cell is None else [*cell.replies.items()]


@dataclass
class Epoch:
    """The time in which a set of ranks uses one communicator.

    ``number`` counts the epochs. The ranks need another one before their next cell if this one is
    ``dirty``: a rank has left a call unfinished, or a cell has failed while messages may have been
    on their way. ``traffic``: whether ranks have used a communicator in this epoch.
    """

    number: int = 0
    dirty: bool = False
    traffic: bool = False

    def note(self, replies: Collection[Reply]) -> None:
        """Handles the replies to a cell, as far as they have come."""
        latest, traffic, failed = 0, False, False
        for reply in replies:
            latest = max(latest, reply.epoch)
            traffic = traffic or reply.traffic
            failed = failed or reply.status != "ok"
            self.dirty = self.dirty or reply.dirty
        if latest > self.number:  # a cell may have begun epochs itself
            self.number, self.traffic = latest, False
        # A rank whose renewal was interrupted may be in an earlier epoch than the others.
        self.dirty = self.dirty or len({reply.epoch for reply in replies}) > 1
        self.traffic = self.traffic or traffic
        # One rank may have sent what a rank that failed has not received.
        self.dirty = self.dirty or (self.traffic and failed)

    def follow(self, number: int) -> None:
        """Handles that the ranks have begun this epoch by themselves."""
        if number > self.number:
            self.begin(number)

    def begin(self, number: int) -> None:
        self.number, self.dirty, self.traffic = number, False, False


# The processes of the ranks.


@dataclass(frozen=True)
class HostLost:
    """A host is lost, with the reason in ``end``, and with it these ranks."""

    end: ProcessExit
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class NotJoined:
    """Processes that were to take the places of these ranks have not joined: the ranks are dead."""

    ranks: Collection[int]


@dataclass(frozen=True)
class DiedBefore:
    """A rank had died when this notebook got the others; ``hello`` describes its process."""

    hello: Hello


@dataclass(frozen=True)
class Seating:
    """Processes are about to take the places of dead ranks."""


@dataclass(frozen=True)
class TookPlaces:
    """Processes have taken the places of these dead ranks; some of them may have died again."""

    ranks: Sequence[int]


@dataclass(frozen=True)
class StartsAgain:
    """All ranks are started again on these hosts, with the same numbers. A host of these may have
    been lost meanwhile.
    """

    hosts: Collection[str] = ()


@dataclass(frozen=True)
class NotRecovered:
    """Ranks have died, with these ends, and cannot be replaced: all ends with them."""

    ends: Sequence[ProcessExit]


@dataclass(frozen=True)
class Came:
    """A process is up as a rank."""

    hello: Hello


@dataclass(frozen=True)
class Deaths:
    """Ranks have died, and others are left or not; ``again`` if a place was vacant before."""

    ends: tuple[ProcessExit, ...]
    again: bool = False


ClusterEvent = (
    Hello
    | Replaces
    | ProcessExit
    | HostLost
    | NotJoined
    | DiedBefore
    | Seating
    | TookPlaces
    | StartsAgain
    | NotRecovered
    | EpochBegun
    | EpochEnded
)


class ClusterState:
    """The ranks of one cluster: which are up, which have ended, and how; and the cell they run.

    ``phase`` is ``new``, ``starting``, ``running``, ``stopped`` or ``lost``, and ``lost_because``
    the reason. ``ends`` cannot be replaced, ``dead`` can; ``new`` have come up since.
    ``died_again`` is the end of ranks that died just after taking a place. ``lost_hosts`` has the
    reason for each lost host whose ranks are not started elsewhere yet.

    ``cell`` is the cell that runs, or that was ``abandoned`` while ranks were in it; ``cells`` have
    been sent so far, by any notebook, and ``begun`` is the last that this one has begun. ``sent``
    is the record of the last that it has sent, and when, on Python's monotonic clock. ``thread``
    waits for the cell, or for the feature that has ``reserved`` the ranks: a text with what it runs
    on them, and how the user ends it. At the end of a cell, the thread that ``concludes`` replaces
    ranks that have died; it is 0 otherwise.

    ``epoch`` is that of the ranks; ``begun_epoch`` and ``ended_epoch`` are the latest that requests
    of clients have begun, and ended. ``needs`` has the rank whose end ends another one too.
    ``saved`` are those that have saved their variables for their replacement, and a training that a
    death has ended can continue from commit ``goes_on``, if it is not 0.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        #: When ranks that die are replaced: ``on``, ``ask`` for it, or ``off``.
        self.replacing = "on"
        self.saved, self.cells, self.goes_on, self.concludes = set[int](), 0, 0, 0
        self.connect()
        self.phase = "new"

    def connect(self, can_replace: bool = False, can_relocate: bool = False) -> None:
        """Begins with other ranks: new ones, or those that another notebook has left.

        ``can_replace``: another process can take the place of a rank that dies. ``can_relocate``:
        all can be started again on the other hosts if a host is lost.
        """
        self.set_phase("starting")
        self.can_replace, self.can_relocate = can_replace, can_relocate
        self.cell: CellState | None = None
        self.sent: tuple[RunCell, float] | None = None
        self.abandoned = False
        self.begun = 0
        self.reserved, self.thread = "", 0
        self.epoch, self.begun_epoch, self.ended_epoch = Epoch(), 0, -1
        self.needs: dict[int, int] = {}
        self.hellos: dict[int, Hello] = {}
        self.ends: list[ProcessExit] = []
        self.dead: dict[int, ProcessExit] = {}
        self.new: set[int] = set()
        self.died_again: dict[int, ProcessExit] = {}
        self.lost_hosts: dict[str, str] = {}
        #: The process that takes the place of each rank that has died, the last to be started.
        self._pids: dict[int, int] = {}
        #: Ranks in whose places no process has joined: the next end of any process is their death.
        self._vacant: set[int] = set()

    def set_phase(self, phase: str, why: str = "") -> None:
        """``why`` is the reason if the ranks are lost, or stopped: then they are ``closed``."""
        self.phase, self.lost_because = phase, why
        self.closed = phase in ("stopped", "lost")

    def begin_cell(self, cell: int, ranks: Iterable[int], thread: int) -> None:
        # First: a thread that reads the cell, and then whose it is, never has that of another one.
        self.thread, self.cells, self.begun = thread, cell, cell
        self.cell, self.abandoned = CellState(cell, ranks), False

    def end_cell(self) -> None:
        """All ranks have left the cell, as far as is known."""
        if self.cell is not None:
            self.saved |= self.ending.keys()
            self.needs = self._needs
            self.epoch.note(self.cell.replies.values())
            # The reply of a rank was lost, and with it how the rank has left the cell.
            self.epoch.dirty = self.epoch.dirty or bool(self.cell.pending)
        self.cell = None

    def reserve(self, text: str, thread: int) -> None:
        """Lets no cell begin until `release`; ``text`` continues "found the ranks"."""
        self.reserved, self.thread = text, thread

    def release(self, cells: int) -> None:
        self.reserved, self.cells = "", cells

    @property
    def unsettled(self) -> bool:
        """Whether the ranks may still be in a cell, or are to begin another epoch, or have begun
        one, since the last cell that this notebook sent.
        """
        epoch = self.epoch
        left = self.begun_epoch > epoch.number or self.ended_epoch >= epoch.number
        return left or epoch.dirty or self.cell is not None

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.hellos]

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank not in self.dead)

    @property
    def replaced(self) -> tuple[int, ...]:
        """The ranks whose processes have taken the place of one that has died."""
        pids = self._pids.copy()
        hellos = {rank: self.hellos.get(rank) for rank in pids}
        return tuple(r for r, it in hellos.items() if it is not None and it.pid == pids[r])

    @property
    def running(self) -> CellState | None:
        """The cell for which a thread waits."""
        return None if self.abandoned else self.cell

    @property
    def busy(self) -> bool:
        """Whether a cell or a function runs, or a feature has reserved the ranks."""
        return bool(self.reserved) or self.running is not None

    @property
    def caller(self) -> int:
        """The thread whose call runs, or 0."""
        return self.thread if self.busy else self.concludes

    @property
    def replaces_now(self) -> bool:
        """Whether ranks that have died are to be replaced without a command."""
        waiting = self.phase == "running" and self.replacing == "on"
        return waiting and not self.ends and bool(self.dead)

    @property
    def have_left(self) -> dict[int, str]:
        """The ranks that have left the running cell, with the status of their replies."""
        return {rank: reply.status for rank, reply in _replies(self.running)}

    @property
    def ending(self) -> dict[int, str]:
        """The ranks that can run no further cell, with the reasons."""
        if not self.can_replace:
            return {}
        return {rank: reply.ends for rank, reply in _replies(self.running) if reply.ends}

    @property
    def _needs(self) -> dict[int, int]:
        return self.needs | {rank: reply.needs for rank, reply in _replies(self.cell)}

    def survivors(self, killed: Collection[int]) -> tuple[int, ...]:
        """The ranks that keep their variables if these are killed; none if all end with them."""
        if self.ends or self.missing or not self._spares(self.can_replace):
            return ()
        others = [rank for rank in self.alive if rank not in killed]
        return tuple(rank for rank in others if self._needs.get(rank, -1) not in killed)

    def why_no_survivors(self, killed: Collection[int]) -> str:
        """Returns why others end with these, in words; "" if no other is left, or the launcher
        knows the reason.
        """
        others = [rank for rank in self.alive if rank not in killed]
        if not others or not self.can_replace:
            return ""
        if self.replacing == "off":
            return "dead ranks are not replaced"
        needed = {self._needs.get(rank, -1) for rank in others} & set(killed)
        return f"{label(others)} cannot run without {label(needed)}" if needed else ""

    def _spares(self, possible: bool) -> bool:
        """Whether other ranks survive a death. A feature that has reserved the ranks begins its
        work again on fresh ones.
        """
        wanted = self.replacing != "off" and not self.reserved
        return possible and wanted and self.phase == "running"

    def is_outdated(self, end: ProcessExit) -> bool:
        """Whether the end is left from a replacement that did not succeed."""
        return end.rank not in self._vacant and end.pid != self._pids.get(end.rank, end.pid)

    def is_no_news(self, end: ProcessExit) -> bool:
        """Whether this end is known, outdated, or follows from the loss of a host."""
        known = (self.dead.get(end.rank), self.died_again.get(end.rank))
        if end.pid > 0 and any(
            one is not None and (one.host, one.pid) == (end.host, end.pid) for one in known
        ):
            return True
        # Without one of its hosts, MPI's job ends, and another one follows.
        return self.is_outdated(end) or (end.rank == -1 and bool(self.lost_hosts))

    def apply(self, event: ClusterEvent) -> tuple[Came | Deaths, ...]:
        """Returns what has happened to the ranks."""
        match event:
            case Hello(rank=rank):
                # The hello of a process that has been replaced since does not count.
                if event.pid != self._pids.get(rank, event.pid):
                    return ()
                self.hellos[rank] = event
                self.new.add(rank)
                return (Came(event),)
            case Replaces(rank=rank):
                self._pids[rank] = event.pid
                self.died_again.pop(rank, None)
            case ProcessExit():
                return self._end(event, self._spares(self.can_replace))
            case HostLost(end, ranks):
                return self._lose_host(end, ranks)
            case NotJoined(ranks):
                self._vacant |= set(ranks) - self.hellos.keys()
            case DiedBefore(hello):
                self.hellos.setdefault(hello.rank, hello)
            case Seating():
                self.new.clear()
                self.died_again.clear()
            case TookPlaces(ranks):
                for rank in ranks:
                    self.dead.pop(rank, None)
                    if rank in self.died_again:
                        self.dead[rank] = self.died_again[rank]
                self.needs.clear()  # what had needed them has ended
            case StartsAgain(hosts):
                self._start_again(hosts)
            case NotRecovered(ends):
                self.ends = self.ends or list(ends)
            case EpochBegun(epoch=number):
                self.begun_epoch = max(self.begun_epoch, number)
            case EpochEnded(epoch=number):
                self.ended_epoch = max(self.ended_epoch, number)
            case _:
                raise TypeError(f"expected an event of a cluster, found {event!r:.80}")
        return ()

    def _end(self, end: ProcessExit, spared: bool) -> tuple[Deaths, ...]:
        if self.is_no_news(end):
            return ()
        is_rank = end.rank >= 0 and (not end.by_launcher or bool(self.lost_hosts))
        if not (spared and is_rank) or self.ends or self.missing:
            self.ends.append(end)
            return ()
        again = end.rank in self.dead
        self._note_death(end)
        return (Deaths((end,), again),)

    def _lose_host(self, end: ProcessExit, ranks: tuple[int, ...]) -> tuple[Deaths, ...]:
        if not self._spares(self.can_relocate) or self.ends:
            return self._end(end, spared=False)
        self.lost_hosts[end.host] = end.why
        # If ranks are missing, all are being started, and will be again.
        there = () if self.missing else sorted(set(ranks) - self.dead.keys())
        ends = tuple(replace(end, rank=rank) for rank in there)
        for each in ends:
            self._note_death(each)
        return (Deaths(ends),) if ends else ()

    def _note_death(self, end: ProcessExit) -> None:
        self.new.discard(end.rank)
        self._vacant.discard(end.rank)
        (self.died_again if end.rank in self.dead else self.dead)[end.rank] = end
        # With its last rank the cluster has ended: no variables are left.
        if not self.alive:
            self.ends += self.dead.values()
        if self.cell is not None:
            self.cell.apply(end)

    def _start_again(self, hosts: Collection[str]) -> None:
        losses = self.lost_hosts | {end.host: end.why for end in self.ends if end.why}
        for known in (self.hellos, self.dead, self.died_again, self._pids, self.needs):
            known.clear()
        self.lost_hosts = {host: why for host, why in losses.items() if host in hosts}
        self.ends.clear()
        self.new.clear()
        self._vacant.clear()
        self.begun_epoch, self.ended_epoch = 0, -1
