"""One rank's world: who there is, what is under way, and how a call is driven to its end.

There is one world a process, behind ``init()``; the loopback has one a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from mmap import mmap
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from allranks.collectives.calls import board as fields
from allranks.collectives.calls.board import Board
from allranks.collectives.calls.call import Agreement, Call, Members, Prepared
from allranks.collectives.calls.journal import Journal
from allranks.collectives.calls.peers import PROCESS
from allranks.collectives.calls.presence import Presence
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.transport import Transport
from allranks.collectives.calls.wait import Steps, drive
from allranks.collectives.calls.watch import Watch
from allranks.collectives.calls.whereabouts import Whereabouts
from allranks.collectives.gpu.device import Device
from allranks.collectives.host.channel import Channel, group_nbytes
from allranks.collectives.host.memory import Window
from allranks.collectives.host.shared_memory import SharedMemoryTransport
from allranks.collectives.world.group import Group
from allranks.collectives.world.kept import Kept
from allranks.errors import CollectiveMismatch, NotInitialized, RankLeft, UsageError

if TYPE_CHECKING:
    from allranks.collectives.mpi.epochs import Epochs

ALONE = -1
"""The number of the group that each rank is by itself."""
_TURN_SECONDS = 1e-3
FIRST_MADE = 1 << 20
"""Numbers from here on belong to groups of communicators, those below to process sets."""


class Meeting(Protocol):
    """Where ranks meet that use another library's collectives."""

    def announce(self) -> None:
        """From now on this process's environment says so."""

    def withdraw(self) -> None:
        """It says so no longer."""

    def held(self) -> AbstractContextManager[None]:
        """Within, the environment tells of this world only."""


class World(Standing):
    """Everything that one rank knows: how it stands, its groups, and what is under way."""

    def __init__(self, rank: int, hosts: tuple[int, ...], board: Board) -> None:
        super().__init__(rank, hosts, board)
        self.window: Window | None = None
        self.gpu: Device | None = None
        """This rank's GPU, from the first array on one on."""
        self.mpi: Epochs | None = None
        self.meeting: Meeting | None = None
        self.keeps: Kept | None = None
        """What this rank keeps, where another process may take its place."""
        self.groups: dict[int, Group] = {}
        self.sets: dict[int, tuple[int, ...]] = {}
        """The process sets by number, those that this rank is not in as well."""
        self.made = FIRST_MADE
        """The number of the last group that a communicator has made."""
        self.dirty = False
        self.quarantine: list[Any] = []
        """Arrays of calls that were left: a peer may still write to them in this epoch."""
        self.lock = threading.RLock()
        self._turns = threading.Condition(self.lock)
        self._queued: list[Call] = []
        """The calls of threads that wait for the lock, in calls that wait themselves included."""
        self.journal = Journal(self)
        self.presence = Presence()
        self.watch = Watch(self)
        self.within: Call | None = None
        """The call that a thread of this rank makes, but for those that handles stand for."""
        self._told_of_threads = -1
        """The number of the cell that was told last that its threads call at once."""
        self.whereabouts: Whereabouts | None = None
        self.notebook = False
        """True once an engine has entered a cell: then the scope is not the process."""
        self.left_behind: set[threading.Thread] = set()
        """The threads that were there when the cell began."""
        self.told_of_strays = False
        """Whether it has been said, since the cell began, that a call is not the cell's."""

    def open(
        self, number: int, ranks: tuple[int, ...], memory: mmap | None, *, now: bool = True
    ) -> None:
        """A group is there that this rank is in, with its way to agree and its transports.

        ``memory`` is what those on this host share, as `group_nbytes` says; None where members can
        share none. ``now`` is False while the world itself is made.
        """
        members = Members(number, ranks, self.rank)
        hosts = self.sharing(ranks)
        if memory is None:
            hosts = tuple((rank,) for rank in ranks)
            memory = mmap(-1, group_nbytes(len(hosts), 1, len(ranks)))
        several = len(hosts) > 1
        transports: dict[str, Transport] = {}
        agreement: Agreement
        if self.mpi is not None:
            mpi = transports["mpi"] = self.mpi.transport(members, now=now and several)
        if several:
            assert self.mpi is not None
            agreement, bridge = self.mpi.bridge(members, hosts, memory, mpi)
            transports["shared"] = transports[bridge.name] = bridge
        else:
            agreement = channel = Channel(self, members, memory)
            transports["shared"] = SharedMemoryTransport(channel, self.window)
        self.groups[number] = Group(self, agreement, transports)

    def close(self, number: int) -> None:
        """Forgets a group, if there is one of that number.

        Its communicator of NCCL stays until `end_closed`, or the end of the epoch: other members
        may still wait for what this rank sends.
        """
        gone = self.groups.pop(number, None)
        if gone is not None:
            gone.abandon()
            if self.gpu is not None:
                self.gpu.forget(number)

    def end_closed(self) -> None:
        """Ends the communicators of NCCL of groups that are closed, once all ranks have come.

        Whoever has come is through with the calls of the groups that it closed before.
        """
        if self.gpu is not None:
            self.gpu.aborts.abort()

    def run(
        self,
        call: Call,
        move: Callable[[Call, Any, Any], Prepared[Any]] | None = None,
        source: Any = None,
        how: Any = None,
    ) -> Any:
        """Drives a call to its end and returns its result.

        Args:
            call: with its steps, or without where it is one move of a transport and no more.
            move: that move, which is given the call, ``source`` and ``how``.
        """
        if self.notebook and (self.scope is PROCESS or get_ident() != self.main_thread):
            self._look_for_strays(call)
        if not self.lock.acquire(blocking=False):
            return self._in_turn(call, move, source, how)
        try:
            if self.dirty or self.pending:
                self.check_clean(call)
                self.within = call
                if move is not None:
                    call.steps = call.moved(move, source, how)
                result = self._among_others(call, self._alongside(call))
                self.within = None
                return result
            self.within = call
            try:
                if move is None:
                    result = self._drive(call.steps)
                    del call.steps  # and with them what they hold
                else:
                    offer, rest = move(call, source, how)
                    if not call.agreement.come(call, offer):
                        result = self._drive(call.waited(offer, rest))
                    else:
                        # Where all were there at once nothing may have to be driven.
                        result = rest() if callable(rest) else self._drive(rest)
            except BaseException as error:
                self.fail(call, error)
                raise
            call.ended = perf_counter()
            call.held = None
            # Through shared memory it ends with an arrival, which says that this is done.
            if call.ordered and call.transport != "shared":
                call.agreement.finish(call)
            if move is not None or call.device_seconds is None:
                self.journal.keep(call)
            else:
                self.journal.add(call)
            self.within = None
            return result
        finally:
            self.lock.release()

    def _in_turn(self, call: Call, *arguments: Any) -> Any:
        """Runs a call while another thread of this rank is in one."""
        self._look_at_threads(call)
        self._queued.append(call)
        with self.lock:
            self._queued.remove(call)
            return self.run(call, *arguments)

    def _attend(self, call: Call, waited: float) -> None:
        """Called every 20 ms of a wait: another thread may make the call that ends it.

        Of two collectives the first one ends before the other one begins.
        """
        if self._queued and sum(other.ordered for other in (call, *self._queued)) <= 1:
            self.watch.rest()
            self._queued.append(call)
            try:
                self._turns.wait(_TURN_SECONDS)  # without the lock
            finally:
                self._queued.remove(call)
                self.within = call
        self.watch.attend(call, waited)

    def _look_at_threads(self, call: Call) -> None:
        """Gives a notice, once a cell, where another thread is in a call of the same group."""
        other, cell = self.within, self.scope.number
        if (
            other is not None
            and other.ordered
            and call.ordered
            and other.members.number == call.members.number
            and self._told_of_threads != cell
        ):
            self._told_of_threads = cell
            self.notice(
                f"{call.spec.op} is called from several threads at once: ranks match calls by "
                "their order, which threads do not keep, so that a result may be another call's. "
                "Call collectives from one thread."
            )

    def _look_for_strays(self, call: Call) -> None:
        """Gives a notice, once after a cell's beginning, where a call is not that cell's."""
        between = self.scope is PROCESS
        if self.told_of_strays or not call.ordered or call.members.size == 1:
            return
        if between or threading.current_thread() in self.left_behind:
            self.told_of_strays = True
            who = "after its cell has ended" if between else "by a thread of an earlier cell"
            self.notice(
                f"{call.spec.op} is called {who}: ranks match calls by their order, so that a call "
                "of another cell may be taken for it, and a result may be wrong. Wait for threads "
                "and tasks in the cell that starts them."
            )

    def join(self, call: Call) -> Any:
        """Waits for a call that was submitted and returns its result."""
        with self.lock:
            if not call.done:
                self.check_clean(call)
                return self._among_others(call, self._until(call))
            if call.error is not None:
                raise call.error
            return call.result

    def _among_others(self, call: Call, steps: Steps[Any]) -> Any:
        with self.presence:
            try:
                return self._drive(steps)
            except BaseException as error:
                self.fail(call, error)
                raise

    def _drive(self, steps: Steps[Any]) -> Any:
        try:
            return drive(steps, self._attend, self.spin_seconds)  # type: ignore[arg-type]
        except Exception as error:
            lost = self.mpi.lost_by(error) if self.mpi is not None else None
            if lost is None:
                raise
            raise lost from None
        finally:
            self.watch.rest()

    @property
    def threaded(self) -> bool:
        """Whether a thread that was started in this cell may call as well."""
        known = self.left_behind | {threading.current_thread(), threading.main_thread()}
        return get_ident() != self.main_thread or not known.issuperset(threading.enumerate())

    def submit(self, call: Call) -> Call:
        """Posts a call as far as it goes without waiting."""
        if self.notebook and (self.scope is PROCESS or get_ident() != self.main_thread):
            self._look_for_strays(call)
        with self.lock:
            self.check_clean(call)
            with self.presence:
                self._enqueue(call)
                self.progress()
            return call

    def poll(self, call: Call) -> None:
        """Takes everything under way as far as it goes without waiting."""
        with self.lock:
            self.check_clean(call)
            with self.presence:
                self.progress()

    def _enqueue(self, call: Call) -> None:
        self.presence.begin(call)
        # In this order: one too many ends the epoch with the cell, one too few mixes two cells.
        self.pending += 1
        self.groups[call.members.number].queue.append(call)

    def progress(self) -> None:
        """Takes every group's first call as far as it goes without waiting."""
        for group in list(self.groups.values()):
            while group.queue:
                call = group.queue[0]
                try:
                    if not self._advance(call):
                        break
                except BaseException as error:
                    # Its steps are over, and nobody can go on with it.
                    call.posted = True
                    self.fail(call, error)
                    raise
                call.done = True
                group.queue.popleft()
                self.pending -= 1

    def _advance(self, call: Call) -> bool:
        """Takes a call as far as it goes without waiting; True at its end."""
        try:
            next(call.steps)
        except StopIteration as end:
            call.result = end.value
            self.finish(call)
        except (CollectiveMismatch, UsageError) as error:
            call.error = error
        else:
            self.presence.note(call)
            return False
        return True

    def finish(self, call: Call) -> None:
        """Notes the end of a call with which others may have been under way."""
        call.ended = perf_counter()
        self.presence.end(call)
        call.held = None
        if call.ordered and call.transport != "shared":
            call.agreement.finish(call)
        self.journal.add(call)

    def _alongside(self, call: Call) -> Steps[Any]:
        """Drives a call and everything under way: in its turn, if it takes part in the order."""
        if call.ordered:
            self._enqueue(call)
            return (yield from self._until(call))
        self.presence.begin(call)
        while True:
            self.progress()
            try:
                yield next(call.steps)
            except StopIteration as end:
                self.finish(call)
                return end.value

    def _until(self, call: Call) -> Steps[Any]:
        """Drives everything under way until one call is done."""
        while True:
            self.progress()
            if call.done:
                break
            first = self.groups[call.members.number].queue[0]
            # What holds it up may be a rank that its own group does not have.
            yield first.behind or first
        if call.error is not None:
            raise call.error
        return call.result

    def check_clean(self, call: Call) -> None:
        """Lets no call begin in an epoch that is over for this rank."""
        if self.dirty:
            raise RankLeft(
                f"{call.spec.title} needs an intact epoch: this rank has left an earlier "
                "collective of it unfinished. The next cell starts a fresh one; in a script call "
                "allranks.collectives.renew() on every rank."
            )

    def fail(self, call: Call, error: BaseException) -> None:
        """Says on the board that this rank has left a collective, if it has."""
        self.within = None
        # A usage error that comes after all have agreed comes on all: the epoch is whole.
        if isinstance(error, (CollectiveMismatch, UsageError)) and not call.deadlock:
            return
        if call.deadlock:
            self.spoil(call.deadlock, call, deadlock=True)
        elif not call.posted or (call.ordered and call.members.size == 1):
            return  # nobody else could wait for what it has left
        elif isinstance(error, RankLeft):
            self.spoil(f"has given up {call.spec.title} at {call.site}", call)
        else:
            self.spoil(f"has left {call.spec.title} at {call.site} ({type(error).__name__})", call)
        self.quarantine.append(call.held)

    def refuse(self, call: Call) -> None:
        """Says on the board that this rank cannot make a call to which all have come.

        The epoch stays whole where all refuse; those that do not leave the call when they see it.
        """
        call.posted = False
        self.board.write(fields.BROKE, f"cannot make {call.spec.title} at {call.site}")
        self.board.put(fields.REFUSED, call.number)
        self.board.put(fields.REFUSED_OF, call.members.number + 1)

    def spoil(self, why: str, call: Call | None = None, *, deadlock: bool = False) -> None:
        """This rank can take part in no further collective of this epoch."""
        if self.dirty:
            return
        self.dirty = True
        # First: what is aborted ends only when the others have heard of it, and abort as well.
        self.give_up(why, deadlock=deadlock)
        for group in list(self.groups.values()):
            group.abandon()
        if self.gpu is not None:
            if call is not None and call.spec.device:
                self.gpu.hold(call)
            self.gpu.end()

    def leave(self, reason: str, failed: bool, where: str, *, gone: bool = False) -> None:
        """This rank's scope has ended."""
        if self.pending:
            self.spoil(f"has left {self.scope.name} without synchronize() on a handle")
        super().leave(reason, failed, where, gone=gone)

    def renewed(self, epoch: int) -> None:
        """A new epoch has begun: nothing of the old one counts any more."""
        self.start_over(epoch)
        self.dirty, self.pending = False, 0
        self.quarantine.clear()
        for group in list(self.groups.values()):
            group.abandon()
        if self.gpu is not None:
            self.gpu.end()
        # Groups that Split() and Dup() have made end with their epoch.
        self.groups = {n: group for n, group in list(self.groups.items()) if n < FIRST_MADE}
        for _, group in sorted(self.groups.items()):
            group.renew()


process: World | None = None
"""This process's world, until a thread has one of its own: looking that up costs every call."""
_process: World | None = None
_threads = threading.local()
_threaded = False


def current() -> World:
    """This rank's world.

    Raises:
        NotInitialized: before ``init()``, or after ``shutdown()``.
    """
    found = _found()
    if found is None:
        raise NotInitialized(
            "collectives need init() first, and it has not been called on this rank. "
            "Call allranks.collectives.init()."
        )
    return found


def set_process(world: World | None) -> None:
    """Makes a world this process's."""
    global process, _process
    _process = world
    process = None if _threaded else world


def set_thread(world: World | None) -> None:
    """Makes a world this thread's: the loopback."""
    global process, _threaded
    process, _threaded = None, True
    _threads.world = world


def exists() -> bool:
    """True between ``init()`` and ``shutdown()``."""
    return _found() is not None


def _found() -> World | None:
    own: World | None = getattr(_threads, "world", None)
    return own or _process
