"""The state of one rank: its groups, its calls under way, and the functions that drive a call to
its end.

A process has one world, behind ``init()``; in the loopback each thread has one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from mmap import mmap
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.call import (
    Agreement,
    Call,
    Members,
    Prepared,
    Steps,
    Transport,
    drive,
)
from allranks.collectives.calls.journal import Journal, Presence, named
from allranks.collectives.calls.posts import Posts
from allranks.collectives.calls.rank_state import PROCESS, Board, RankState
from allranks.collectives.calls.specs import Spec, of_request, pack
from allranks.collectives.calls.watch import LineReporter, Watch
from allranks.collectives.gpu.device import Device
from allranks.collectives.gpu.transport import GpuTransport
from allranks.collectives.host.memory import Window, rounded
from allranks.collectives.host.shared_memory import Channel, SharedMemoryTransport
from allranks.errors import (
    CollectiveError,
    CollectiveMismatch,
    NotInitialized,
    RankLeft,
    RankLost,
    StaleHandle,
    TransportFailed,
    UsageError,
)
from allranks.records.deferred import deferred
from allranks.records.ranks import RUNNING, WAITS, Activity, label

if TYPE_CHECKING:
    from allranks.collectives.mpi.transport import Epochs


class Group:
    """The ranks of one process set: how they agree, their queue of calls, and their transports."""

    def __init__(
        self, own: RankState, agreement: Agreement, transports: dict[str, Transport]
    ) -> None:
        self.own, self.agreement, self.transports = own, agreement, transports
        self.members = agreement.members
        self.number, self.ranks = self.members.number, self.members.ranks
        self.me, self.size = self.members.me, self.members.size
        self.through_host = transports["shared" if "shared" in transports else "mpi"]
        """The fastest transport between the members' host memories."""
        self.queue: deque[Call] = deque()
        self.plans: dict[object, Any] = {}
        """Cached properties of calls of the same kind."""
        self.gpu: GpuTransport | None = None
        """The transports of the members' GPUs; None before an epoch's first array on a GPU."""
        self._posts: dict[int, Posts] = {}
        """Those of this group, by its number, from its first request on."""
        self.refused = 0
        """How many calls of MPI this rank has refused in this epoch; other members may have made
        them."""

    @property
    def posts(self) -> Posts:
        """The requests of collectives on this group."""
        if self.number not in self._posts:
            # One call of a dict: two threads may make their first requests at once.
            self._posts.setdefault(self.number, Posts(self.own, self.number))
        return self._posts[self.number]

    def leave(self, dropped: Collection[Any]) -> None:
        """See `Posts.leave`; most groups have none."""
        for posts in [*self._posts.values()]:
            posts.leave(dropped)

    @property
    def channel(self) -> Channel | None:
        return self.agreement if isinstance(self.agreement, Channel) else None

    def call(
        self,
        spec: Spec,
        name: str | None = None,
        nbytes: int = 0,
        steps: Callable[[Call], Steps[Any]] = Call.agreed,
    ) -> Call:
        call = Call(self.agreement, pack(spec), name, nbytes)
        call.steps = steps(call)
        return call

    def index(self, root: int, op: str) -> int:
        """The root's place among the members; `UsageError` if it is not a member."""
        if root in self.ranks:
            return self.ranks.index(root)
        raise UsageError(
            f"{op} needs a root that is in the process set: found {root!r}, and it has "
            f"{label(self.ranks)}. The root is a rank of the world."
        )

    def renew(self) -> None:
        self.abandon()
        self.queue.clear()
        self.refused = 0
        self.agreement.renew()
        for transport in self.transports.values():
            transport.renew()

    def abandon(self) -> None:
        if self.gpu is not None:
            self.gpu.abandon(self.queue)
            self.gpu = None

    def choose(self, call: Call, wanted: str = "", device: Device | None = None) -> Transport:
        """The fastest transport of a call, or the wanted one; its arrays may be on a ``device``."""
        if device is not None:
            if self.gpu is None:
                self.gpu = GpuTransport(self.own, self.members, device, self.through_host)
            # Without ``wanted``, the members choose one of its transports together.
            call.transport = wanted or self.gpu.name
            return self.gpu
        name = wanted or self.through_host.name
        if name not in self.transports:
            raise UsageError(
                f"transport={name!r} must reach every rank of the process set; here there is "
                f"{', '.join(sorted(self.transports))}. Leave transport= out."
            )
        found = self.transports[name]
        call.transport = found.name
        return found


T = TypeVar("T")

ALONE = -1
"""The number of the group that contains only this rank."""
_TURN_SECONDS = 1e-3
_AT_ONCE = (False,)
"""The argument of a lock's ``acquire`` that does not wait."""
FIRST_MADE = 1 << 20
"""Groups of communicators have numbers from here on, process sets lower ones."""


def group_nbytes(hosts: int, here: int, members: int) -> int:
    """Bytes of shared memory of a group: its hosts, its members on this host, all its members."""
    if hosts == 1:
        return rounded(Channel.nbytes(here))
    # Not at the top of the file: this import starts MPI.
    from allranks.collectives.mpi.agreement import MultiHostAgreement

    return rounded(MultiHostAgreement.nbytes(here, members))


#: How many of the last calls that have ended are searched for one of the same line.
_LAST_CALLS = 1000


class World(RankState):
    """One rank: its state, its groups, and its calls under way."""

    def __init__(self, rank: int, hosts: tuple[int, ...], board: Board) -> None:
        super().__init__(rank, hosts, board)
        self.window: Window | None = None
        self.gpu: Device | None = None
        """This rank's GPU; None before the first array on a GPU."""
        self.mpi: Epochs | None = None
        self.announcements: tuple[Any, ...] = ()
        """By these libraries find the ranks: `Announcement` of `allranks/announcements.py`."""
        self.variable_store: Any = None
        """The `VariableStore` (`ops/keeping.py`); None where `keep` is not possible."""
        self.groups: dict[int, Group] = {}
        self.sets: dict[int, tuple[int, ...]] = {}
        """The ranks of the process sets by number, also of those without this rank."""
        self.made = FIRST_MADE
        """The number of the last group that a communicator has made."""
        self.windows = 0
        """How many windows of MPI this rank has; the others may use its memory at any time."""
        self.dirty = False
        self.quarantine: list[Any] = []
        """Arrays of calls that were left: a peer may write to them until the epoch ends."""
        self.lock = threading.RLock()
        self._turns = threading.Condition(self.lock)
        self._queued: list[Call] = []
        """The calls of threads that wait for the lock, also within the wait of a call."""
        self._paused: list[_Paused] = []
        self._progresses = False
        """Whether posted calls are advanced at this moment."""
        self._advanced: Call | None = None
        """The last one of which a step has run."""
        self._threaded_cell = -1
        """The last cell in which a thread of the user has made a collective."""
        self.journal = Journal(self)
        self.presence = Presence()
        self.watch = Watch(self)
        self.queued: deque[Call] = deque()
        """Calls that only the GPU still works on (`Call.queued`), in the order of their ends."""
        self.lost: RankLeft | None = None
        """Why one of them can never end; raised by the next call, or at the end of the cell."""
        self.within: Call | None = None
        """The call that the thread with the lock makes, except those of handles."""
        self._threads_reported = -1
        """The last cell for which calls from several threads were reported."""
        self.line_reporter: LineReporter | None = None
        self.notebook = False
        """True after an engine has entered a cell, or has run a request of a client: the program is
        not the only scope."""
        self.left_behind: set[threading.Thread] = set()
        """The threads that existed when the cell began; in a script those of allranks."""
        self.strays_reported = False
        """Whether a call outside the cell was reported since the cell began."""
        self.needs = -1
        """The rank whose end ends this process too, as a library's service may; -1 for none."""

    def open(
        self, number: int, ranks: tuple[int, ...], memory: mmap | None, *, now: bool = True
    ) -> None:
        """Adds a group that this rank is in, with its agreement and its transports.

        ``memory`` is shared by the members on this host (`group_nbytes`), or None. ``now`` is False
        while the world itself is made.
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
            # Not at the top of the file: this import starts MPI.
            from allranks.collectives.mpi.transport import MpiTransport

            mpi = MpiTransport(self, members, self.mpi.user, now=now and several)
            transports["mpi"] = mpi
        if several:
            from allranks.collectives.mpi.agreement import MultiHostAgreement
            from allranks.collectives.mpi.multi_host import MultiHostTransport

            assert self.mpi is not None
            agreement = MultiHostAgreement(self, members, hosts, memory, self.mpi.user)
            bridge = MultiHostTransport(agreement, mpi)
            transports["shared"] = transports[bridge.name] = bridge
        else:
            agreement = channel = Channel(self, members, memory)
            transports["shared"] = SharedMemoryTransport(channel, self.window)
        self.groups[number] = Group(self, agreement, transports)

    def close(self, number: int) -> None:
        gone = self.groups.pop(number, None)
        if gone is not None:
            # The NCCL communicator stays until `end_closed` or the end of the epoch: other members
            # may still wait for data of this rank.
            gone.abandon()
            if self.gpu is not None:
                self.gpu.forget(number)

    def drop_ended_memory(self) -> None:
        """Unmaps memory that other libraries have shared with the ranks, and have freed."""
        if self.window is not None and self.window.drop_ended():
            for group in list(self.groups.values()):
                if isinstance(group.through_host, SharedMemoryTransport):
                    group.through_host.forget_places()

    def end_closed(self) -> None:
        if self.gpu is not None:
            # All ranks have arrived at a call since: so they have completed their calls in these
            # groups.
            self.gpu.aborts.abort(completed=True)

    def run(
        self,
        call: Call,
        move: Callable[[Call, Any, Any, Any], Prepared[Any]] | None = None,
        source: Any = None,
        reduction: Any = None,
        out: Any = None,
    ) -> Any:
        """Drives a call to its end and returns its result. A single move of a transport comes as
        ``move``, ``source``, ``reduction`` and ``out``; other calls have steps.
        """
        if get_ident() != self.main_thread:
            self._check_thread(call)
        elif self.notebook and self.scope is PROCESS:
            self._check_for_strays(call)
        outer = None
        # In one step of the interpreter: an interrupt cannot come between the lock and ``try``.
        (acquired,) = map(self.lock.acquire, _AT_ONCE)
        if not acquired:
            self._check_threads(call)
            return self._in_turn(call, self.run, call, move, source, reduction, out)
        try:
            outer = self.within
            if outer is not None:
                return self._aside(outer, self.run, call, move, source, reduction, out)
            if self._paused:
                self._check_nested(call)
                if self._must_wait(call):
                    self._check_advanced(call)
                    self._check_threads(call)
                    return self._in_turn(call, self.run, call, move, source, reduction, out)
            if self.dirty or self.pending:
                self.check_clean(call)
                if self._progresses:
                    self._check_advanced(call)
                self.within = call
                if move is not None:
                    call.steps = call.moved(move, source, reduction, out)
                    if self.gpu is not None and call.spec.device:
                        # It may begin later, in another thread, with another stream.
                        self.gpu.marked(call)
                return self._among_others(call, self._alongside(call))
            self.within = call
            try:
                if move is None:
                    result = self._drive(call.steps)
                    del call.steps  # they hold the arrays
                else:
                    # The steps of `Call.moved` without its generator, which would add 1 µs (27 %)
                    # to a call of 4 bytes.
                    offer, rest = move(call, source, reduction, out)
                    if not call.agreement.arrive(call, offer):
                        result = self._drive(call.waited(offer, rest))
                    else:
                        # If all ranks arrived at once, the rest may need no wait.
                        result = rest() if callable(rest) else self._drive(rest)
            except BaseException as error:
                lost = self._lost_by(error)
                self.fail(call, lost or error)
                if lost is None:
                    raise
                raise lost from None
            call.ended = perf_counter()
            call.held = None
            # A move through shared memory ends with an arrival, which reports that it is done.
            if call.ordered and call.transport != "shared":
                call.agreement.finish(call)
            if move is not None or call.device_seconds is None:
                self.journal.keep(call)
            else:
                self.journal.add(call)
            return result
        finally:
            self.within = outer
            self.lock.release()

    def _aside(self, awaited: Call, act: Callable[..., T], *arguments: Any) -> T:
        """Acts while the call that this thread is within keeps its place before those of others, as
        ``awaited`` does, which may be that of a handle.
        """
        paused = _Paused(awaited, self.within, get_ident())
        try:
            self._paused.append(paused)
            self.within = None
            return act(*arguments)
        finally:  # also where a function for another signal raises
            # In this order: such a function may come in between.
            self.within = paused.within
            if paused in self._paused:
                self._paused.remove(paused)

    def _in_turn(self, call: Call, act: Callable[..., T], *arguments: Any) -> T:
        """Acts on a call, with the lock; calls of other threads that have begun let it go first."""
        waits = True
        try:
            self._queued.append(call)
            with self.lock:
                while self._paused and self._must_wait(call):
                    self._check_advanced(call)
                    self._let_go(self.within)  # that of a function for a signal waits too
                self._queued.remove(call)
                waits = False  # a handle may be there once more, for a wait around this one
                return act(*arguments)
        finally:
            if waits and call in self._queued:  # interrupted before it had the lock
                self._queued.remove(call)

    def _must_wait(self, call: Call) -> bool:
        """Whether a call of another thread, which has begun, must end before this one begins."""
        me = get_ident()
        return any(
            one.thread != me
            and (
                _excludes(call, one.awaited)
                or (one.within is not None and _excludes(call, one.within))
            )
            for one in self._paused
        )

    def _attend(self, call: Call, waited: float) -> None:
        """Called every 20 ms of a wait: another thread may make the call that ends it."""
        # Not a generator: Python drops an interrupt that comes while it ends one.
        if not all(map(partial(_excludes, call), self._queued)):
            self.watch.rest()
            try:
                self._queued.append(call)
                self._let_go(call)
            finally:
                self._queued.remove(call)
        self.watch.attend(self._queued_and_left() or call, waited)

    def _let_go(self, awaited: Call | None) -> None:
        """Gives the lock to other threads for a moment; ``awaited`` must end before theirs of its
        group begin.
        """
        with deferred():  # an interrupt would come between two steps without the lock
            if awaited is not None:
                self._aside(awaited, self._turns.wait, _TURN_SECONDS)  # without the lock
            else:
                self._turns.wait(_TURN_SECONDS)

    def _queued_and_left(self) -> Call | None:
        """A queued call that a rank has left: the GPU ends neither it nor what is behind it."""
        for call in list(self.queued):
            if any(self.has_left(rank, self.epoch) for rank in call.unfinished()):
                return call
        return None

    def _check_thread(self, call: Call) -> None:
        # Threads of libraries call for the cell that waits for them.
        if call.ordered and not isinstance(threading.current_thread(), threading._DummyThread):
            self._threaded_cell = self.scope.number
        if self.notebook:
            self._check_for_strays(call)

    @property
    def calls_in_threads(self) -> bool:
        return self._threaded_cell == self.scope.number

    def _check_threads(self, call: Call) -> None:
        """Gives a notice, once in a cell, if another thread is in a call of the same group."""
        others, cell = [self.within, *(one.within for one in list(self._paused))], self.scope.number
        if self._threads_reported != cell and any(_same_order(call, one) for one in others):
            self._threads_reported = cell
            self.notice(
                f"{call.spec.op} is called from several threads at once: ranks match calls by "
                "their order, which threads do not keep, so that a result may be another call's. "
                "Call collectives from one thread."
            )

    def _check_nested(self, call: Call) -> None:
        """Raises for a call within another one of the same group, which would take its place."""
        me = get_ident()
        # A function for a signal also runs while its thread lets those of others go first.
        mine = [self.within, *(one.within for one in self._paused if one.thread == me)]
        other = next((one for one in mine if one is not None and _same_order(call, one)), None)
        if other is not None:
            raise _nested(call, other)

    @property
    def makes_call(self) -> bool:
        """Whether a thread of this rank is within a call, except of a handle. For any thread."""
        calls = [self.within, *(one.within for one in list(self._paused))]
        # Once more, as the thread of a paused one may have gone on between the two reads.
        return any(call is not None for call in (*calls, self.within))

    def _check_advanced(self, call: Call) -> None:
        """Raises for a call that would wait for steps of posted calls, within such a step."""
        if self._progresses:
            raise _nested(call, self._advanced or call)

    def _check_for_strays(self, call: Call) -> None:
        """Gives a notice, once after the beginning of a cell, if a call is not that cell's.

        Marks a call in a request of a client, so that no call of a cell, or of another client, is
        taken for it.
        """
        if client := self._client_of_call():
            call.packed = of_request(call.packed, client)
        between = self.scope is PROCESS
        if self.strays_reported or not call.ordered or call.members.size == 1:
            return
        if between or threading.current_thread() in self.left_behind:
            self.strays_reported = True
            who = "after its cell has ended" if between else "by a thread of an earlier cell"
            self.notice(
                f"{call.spec.op} is called {who}: ranks match calls by their order, so that a call "
                "of another cell may be taken for it, and a result may be wrong. Wait for threads "
                "and tasks in the cell that starts them."
            )

    def _client_of_call(self) -> int:
        """The client in whose request this thread makes a call; 0 for none.

        A thread that goes on in the background belongs to the cell or request that started it:
        those that run beside it begin and end at other times on each rank.
        """
        thread = threading.current_thread()
        # Threads of libraries call for what the main thread runs.
        if get_ident() == self.main_thread or isinstance(thread, threading._DummyThread):
            return self.client
        return self.clients_of_threads.get(thread, self.client)

    def join(self, call: Call) -> Any:
        return self._in_turn(call, self._join, call)

    def _join(self, call: Call) -> Any:
        if not call.done or call.queued:  # the GPU has not ended a queued one
            self.check_clean(call)
        if not call.done:
            if self._progresses:
                self._check_advanced(call)
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
        except KeyboardInterrupt as interrupt:
            interrupt.waited = self._awaits()  # type: ignore[attr-defined]  # for its report
            raise
        except Exception as error:
            lost = self._lost_by(error)
            if lost is None:
                raise
            raise lost from None
        finally:
            if self.watch.call is not None:
                self.watch.rest()

    def _awaits(self) -> Activity | None:
        """What this rank waits for in a call, also in the moment before the watch looks at it."""
        if self.watch.call is not None:
            return self.doing
        call = self.within
        missing = call.missing() if call is not None else ()
        return Activity(WAITS, call.spec.title, label(missing)) if call and missing else None

    def _lost_by(self, error: BaseException) -> RankLost | None:
        """The error instead of one by which MPI reports the death of a rank."""
        return self.mpi.lost_by(error) if self.mpi is not None else None

    @property
    def threaded(self) -> bool:
        """Whether a thread that was started in this cell may call collectives too."""
        known = self.left_behind | {threading.current_thread(), threading.main_thread()}
        return get_ident() != self.main_thread or not known.issuperset(threading.enumerate())

    def submit(self, call: Call) -> Call:
        if get_ident() != self.main_thread:
            self._check_thread(call)
        elif self.notebook and self.scope is PROCESS:
            self._check_for_strays(call)
        self._in_turn(call, self._submit, call)
        return call

    def _submit(self, call: Call) -> None:
        if self.within is not None or self._paused:
            self._check_nested(call)
        self.check_clean(call)
        if self._progresses:
            self._check_advanced(call)
        with self.presence:
            self._enqueue(call)
            self.progress()

    def poll(self, call: Call) -> None:
        """Advances posted calls, unless another thread waits, which then advances them."""
        (acquired,) = map(self.lock.acquire, _AT_ONCE)
        if acquired:
            try:
                self._poll(call)
            finally:
                self.lock.release()
        elif (
            self.within is not None  # a call that its thread may advance alone
            and not _same_order(call, self.within)
            and not self._must_wait(call)
        ):
            self._in_turn(call, self._poll, call)

    def _poll(self, call: Call) -> None:
        self.check_clean(call)
        with self.presence:
            self.progress()

    def _enqueue(self, call: Call) -> None:
        self.presence.begin(call)
        # In this order: an interrupt in between leaves one pending call too many, which ends the
        # epoch with the cell. One too few would mix the calls of two cells.
        self.pending += 1
        self.groups[call.members.number].queue.append(call)

    def progress(self) -> None:
        """Advances the first call of every group without waiting; nothing within a step of one, as
        in a function for a signal.
        """
        if self._progresses:
            return
        self._progresses = True
        try:
            self._progress()
        finally:
            self._progresses, self._advanced = False, None

    def _progress(self) -> None:
        self._end_queued()
        left_out = self._left_to_others() if self._paused else ()
        # A copy, because a communicator that is dropped meanwhile closes its group.
        for group in list(self.groups.values()):
            while group.queue and group.number not in left_out:
                call = self._advanced = group.queue[0]
                try:
                    if not self._advance(call):
                        break
                except BaseException as error:
                    # Its steps have ended, so no rank can continue it.
                    call.posted = True
                    self.fail(call, error)
                    raise
                call.done = True
                group.queue.popleft()
                self.pending -= 1

    def _left_to_others(self) -> set[int]:
        """The groups of paused calls of other threads, which go on with those of their groups."""
        me = get_ident()
        return {
            one.awaited.members.number
            for one in self._paused
            if one.awaited.ordered and one.thread != me
        }

    def _end_queued(self) -> None:
        if not self.queued:
            return
        while self.queued:
            call = self._advanced = self.queued[0]
            try:
                next(call.steps)
            except StopIteration:
                pass
            except BaseException as error:
                self.fail(call, error)
                raise
            else:
                return
            self.queued.popleft()
            self.pending -= 1
            self._record(call)
        if self.gpu is not None:
            self.gpu.streams_wait = False

    def _on_gpu(self, call: Call) -> Steps[None]:
        """The rest of a call that is queued on the GPU."""
        if self.gpu is not None and call.queued:
            yield from self.gpu.until_ended(call)
        if call.transport == "nccl":  # as `NcclTransport.confirm`
            yield from self.while_one_has_left(call, self.epoch)

    def settle(self) -> None:
        """Waits until the GPU has ended all queued calls; raises why one of them never will."""
        while self.queued:
            self._in_turn(self.queued[-1], self._settle, self.queued[-1])

    def _settle(self, call: Call) -> None:
        self.check_clean(call)
        self._check_advanced(call)
        self._among_others(call, self._until_settled(call))

    def _until_settled(self, call: Call) -> Steps[None]:
        while True:
            self.progress()
            if call not in self.queued:
                return
            yield self.queued[0]

    def look_at_queued(self, waited: float) -> None:
        """Ends queued calls if a rank has left one. A thread calls this while the main thread
        stands still: it may wait in CUDA for a stream that waits for such a call.
        """
        (acquired,) = map(self.lock.acquire, _AT_ONCE)
        if not acquired:
            return  # the main thread is in a call of allranks
        try:
            if self.dirty or not self.queued:
                return
            call = self._queued_and_left() or self.queued[0]
            try:
                self.watch.look(call, waited)
            except RankLeft as left:
                self.lost = left
                self.fail(call, left)
            finally:
                self.watch.rest()
        finally:
            self.lock.release()

    def _advance(self, call: Call) -> bool:
        """Advances a call without waiting; True at its end."""
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
        """Records the end of a call that may have overlapped with others, or that only the GPU
        still works on.
        """
        # Behind such a call: its number would stand for all calls before it.
        if call.queued or (self.queued and call.ordered and call.transport != "shared"):
            call.steps = self._on_gpu(call)
            self.queued.append(call)
            self.pending += 1
        else:
            self._record(call)

    def _record(self, call: Call) -> None:
        call.ended = perf_counter()
        self.presence.end(call)
        call.held = None
        if call.ordered and call.transport != "shared":
            call.agreement.finish(call)
        self.journal.add(call)

    def _alongside(self, call: Call) -> Steps[Any]:
        """Drives a call together with all others under way; ordered calls wait for their turn."""
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
        """Drives all calls under way until one is done."""
        while True:
            self.progress()
            if call.done:
                break
            # A function for a signal may have ended all of them since.
            first = next(iter(self.groups[call.members.number].queue), call)
            # The rank that blocks it may be outside its group.
            yield first.behind or first
        if call.error is not None:
            raise call.error
        return call.result

    def check_clean(self, call: Call) -> None:
        if self.lost is not None:
            raise self.lost
        if self.dirty:
            raise RankLeft(
                f"{call.spec.title} needs an intact epoch: this rank has left an earlier "
                "collective of it unfinished. The next cell starts a fresh one; in a script call "
                "allranks.collectives.renew() on every rank."
            )

    def fail(self, call: Call, error: BaseException) -> None:
        """Publishes that this rank has left a collective, if it has."""
        # After the agreement a usage error is raised on all ranks: the epoch stays intact.
        if isinstance(error, (CollectiveMismatch, UsageError)) and not call.deadlock:
            return
        if call.deadlock:
            self.spoil(call.deadlock, call, deadlock=True)
        elif not call.posted or (call.ordered and call.members.size == 1):
            return  # no other rank waits for it
        elif isinstance(error, RankLeft):
            self.spoil(f"has given up {call.spec.title} at {call.site.place}", call)
        else:
            where = f"{call.spec.title} at {call.site.place}"
            self.spoil(f"has left {where} ({type(error).__name__})", call)
        self.quarantine.append(call.held)

    def refuse(self, call: Call) -> None:
        """Publishes that this rank cannot make a call at which all have arrived."""
        # The epoch stays intact if all ranks refuse. Ranks that do not refuse leave the call, or,
        # if they have ended it, find at the next one that this rank has not made it.
        call.posted = False
        self.groups[call.members.number].refused += 1
        self.board.write(fields.BROKE, f"cannot make {call.spec.title} at {call.site.place}")
        self.board.put(fields.REFUSED, call.number)
        self.board.put(fields.REFUSED_OF, call.members.number + 1)

    def spoil(self, why: str, call: Call | None = None, *, deadlock: bool = False) -> None:
        """Ends this rank's part in the epoch: it can make no further collective."""
        if self.dirty:
            return
        self.dirty = True
        # First: an abort ends only after the other ranks have learned of it, and abort too.
        self.give_up(why, deadlock=deadlock)
        groups = list(self.groups.values())
        if self.gpu is not None and self.gpu.aborts_first:
            for group in groups:
                if group.gpu is not None:
                    group.gpu.park()
            self.gpu.aborts.abort()
        for group in groups:
            group.abandon()
        if self.gpu is not None:
            mine = [call] if call is not None and call.spec.device else []
            self.gpu.leave([*self.queued, *mine])

    @property
    def epoch_ends(self) -> bool:
        """Whether a rank takes no further part in the epoch."""
        # The lowest bit says whether it is a deadlock.
        broken, word = self.board.column(fields.BROKEN), 2 * (self.epoch + 1)
        return self.dirty or word in broken or word | 1 in broken

    @property
    def unfinished(self) -> bool:
        """Whether a collective was left unfinished, so that the world needs another epoch."""
        return self.dirty or self.pending > 0

    def has_repeated(self, call: Call) -> bool:
        made, _ = self.journal.since(self.entered + self.offset_seconds, _LAST_CALLS)
        kind = call.spec.op, call.name or named(call.site), call.members.number
        return any((one.op, one.name, one.process_set) == kind for one in made)

    def leave(self, reason: str, failed: bool, where: str, *, gone: bool = False) -> None:
        if self.queued and not failed and not self.dirty:
            with suppress(RankLeft, TransportFailed):
                self.settle()
        if self.pending:
            self.spoil(f"has left {self.scope.name} without synchronize() on a handle")
        if self.dropped_requests and self.mpi is not None:
            self.mpi.release_dropped()
        for group in list(self.groups.values()):
            group.leave(self.dropped_requests)
        super().leave(reason, failed, where, gone=gone)

    def renewed(self, epoch: int) -> None:
        """Begins a new epoch, and drops the state of the old one."""
        self.epoch, self.within = epoch, None
        self.board.put(fields.BROKEN, 0)
        self.dirty, self.pending = False, 0
        for call in self.queued:
            call.queued = []
            call.error = self.lost or StaleHandle(
                f"the GPU has not ended {call.spec.title} at {call.site}: its cell has failed. "
                "Make the call again."
            )
        self.queued.clear()
        self.lost = None
        if ALONE in self.traffic and self.mpi is not None:
            self.mpi.renew_alone()
        self.traffic.clear()
        self.quarantine.clear()
        for group in list(self.groups.values()):
            group.abandon()
        if self.gpu is not None:
            self.gpu.end()
            self.gpu.streams_wait = False
        # Groups of Split() and Dup() end with their epoch.
        self.groups = {n: group for n, group in list(self.groups.items()) if n < FIRST_MADE}
        for _, group in sorted(self.groups.items()):
            group.renew()


class _Paused(NamedTuple):
    """A wait of a thread that lets the calls of others go first: it has not the lock."""

    awaited: Call
    """The call whose end it awaits first, which may be that of a handle."""
    within: Call | None
    thread: int


def _same_order(one: Call, other: Call | None) -> bool:
    """Whether the ranks match two calls by one order: that of their group."""
    return (
        other is not None
        and one.ordered
        and other.ordered
        and one.members.number == other.members.number
    )


def _nested(call: Call, other: Call) -> CollectiveError:
    # No usage error: if it ends the other call, other ranks may wait for this one in that.
    return CollectiveError(
        f"{call.spec.title} at {call.site} needs the end of the call before: this rank is within "
        f"{other.spec.title} at {other.site}. A function that Python calls at any moment, as one "
        "for a signal or __del__, has to leave collectives to the program."
    )


def _excludes(one: Call, other: Call) -> bool:
    """Whether two calls of different threads cannot overlap: the ranks match the calls of a group
    by their order, and a GPU has one order for all groups of NCCL.
    """
    both = one.ordered and other.ordered
    return _same_order(one, other) or bool(both and one.spec.device and other.spec.device)


process: World | None = None
"""The world of this process, None if any thread has its own: a look-up for each call is slow."""
_process: World | None = None
_threads = threading.local()
_threaded = False


def current() -> World:
    found = _found()
    if found is None:
        raise NotInitialized(
            "collectives need init() first, and it has not been called on this rank. "
            "Call allranks.collectives.init()."
        )
    return found


def set_process(world: World | None) -> None:
    global process, _process
    _process = world
    process = None if _threaded else world


def set_thread(world: World | None) -> None:
    """Gives this thread its own world, for the loopback."""
    global process, _threaded
    process, _threaded = None, True
    _threads.world = world


def exists() -> bool:
    return _found() is not None


def _found() -> World | None:
    own: World | None = getattr(_threads, "world", None)
    return own or _process


class scope:
    """The cell of a rank, as an engine sees it: enter before a cell, leave after it."""

    @staticmethod
    def enter(name: str, ranks: tuple[int, ...] | None = None, number: int = 1) -> None:
        """This rank starts a cell.

        Args:
            name: for messages, for instance "this cell".
            ranks: the ranks that run it, the same on each of them; None for all.
            number: counts the cells of all ranks from 1. A rank that has not reached this number is
                late, one that has left it is gone.
        """
        this = current()
        this.notebook, this.strays_reported = True, False
        this.within = None  # which an interrupt may have left
        # Threads of libraries call for the cell that waits for them.
        own = (t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
        this.left_behind = set(own)
        this.enter(name, ranks, number)

    @staticmethod
    def leave(reason: str = "", failed: bool = False, where: str = "") -> None:
        """This rank's cell has ended; ranks that wait for it raise `RankLeft`.

        Args:
            reason: for the others' messages, for instance "ValueError: bad shape".
            failed: whether it raised.
            where: the file and line at which it raised, as ``file:7``.
        """
        current().leave(reason, failed, where)

    @staticmethod
    def fail(number: int, reason: str) -> None:
        """The cell failed outside of its lines, wherever: before `enter`, within, after `leave`.

        `leave` alone would say that this rank has not come yet, and the others would wait for it.
        """
        this = current()
        if this.scope.number != number:
            this.enter("this cell", None, number)
        this.leave(reason, failed=True, where="")

    @staticmethod
    def asks(doing: Activity = RUNNING) -> None:
        """Publishes that this rank waits for a person, and is not late; or that it runs again."""
        current().asks(doing)
