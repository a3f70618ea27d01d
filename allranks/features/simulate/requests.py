"""Requests of simulated ranks: sends, receives and collectives that were posted.

A method stands for the rank that runs: all ranks share the object MPI.COMM_WORLD.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from time import thread_time
from typing import Any, NoReturn

from mpi4py import MPI

from allranks.collectives.calls import sites
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.sites import Site
from allranks.collectives.world import current
from allranks.errors import UsageError
from allranks.features.simulate import buffers
from allranks.features.simulate.events import PostedReceive, SimulatedMessage
from allranks.features.simulate.scheduler import Scheduler, Wait
from allranks.features.simulate.world import SimulatedWorld, point_call

ON_REAL_RANKS = "Leave out --simulate to run this cell on real ranks: %%distributed -n 4"


def refuse_missing(one: object, name: str, real: type, what: str) -> NoReturn:
    """Raises for an attribute that an object does not have: an own error if mpi4py's has it."""
    if not name.startswith("_") and hasattr(real, name):
        raise UsageError(
            f"expected a call that simulated ranks have, found {what}.{name}. {ON_REAL_RANKS}"
        )
    raise AttributeError(f"{type(one).__name__!r} object has no attribute {name!r}")


def running_world() -> SimulatedWorld:
    found = current()
    if not isinstance(found, SimulatedWorld):
        raise UsageError(
            "a communicator of simulated ranks can be used in their cells only, in the rank's own "
            "thread: found a call from elsewhere. Make the call in the cell itself"
        )
    return found


def timed_by_network(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose own work takes no simulated time: its messages and collectives do."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        # First of all: a simulated call may take less time than this function.
        now = thread_time()
        scheduler = running()
        outer = scheduler.begin_call(now)
        try:
            return function(*arguments, **options)
        finally:
            scheduler.end_call(outer)

    return call


def running() -> Scheduler:
    """The scheduler of the rank that runs."""
    return running_world().scheduler


def _site() -> Site:
    return sites.find(sys._getframe(2))


def block(world: SimulatedWorld, title: str, number: int, peers: Iterable[int], site: Site) -> None:
    """Waits for one of some ranks."""
    call = point_call(world, title, number, tuple(peers))
    call.site = site
    world.scheduler.block(Wait(call, lambda: call.peers, every=len(call.peers) == 1))


def describe(status: MPI.Status | None, source: int, tag: int, nbytes: int) -> None:
    if status is not None:
        status.Set_source(source)
        status.Set_tag(tag)
        status.Set_error(MPI.SUCCESS)
        status.Set_elements(MPI.BYTE, nbytes)


class SimulatedRequest:
    """A request of a simulated rank, complete from the beginning unless a subclass waits."""

    _ended = False
    """Whether a wait or a test has ended it; then it is MPI.REQUEST_NULL."""

    def __bool__(self) -> bool:
        return not self._ended

    def __eq__(self, other: object) -> bool:
        return other is self or (self._ended and other == MPI.REQUEST_NULL)

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        refuse_missing(self, name, MPI.Prequest, "request")

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Whether it has completed; the other ranks run meanwhile."""
        return self._tested(status)[0]

    def test(self, status: MPI.Status | None = None) -> tuple[bool, Any]:
        """As `Test`, with the object that was received."""
        return self._tested(status)

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Ends when it has completed."""
        self._finish(status)
        return True

    def wait(self, status: MPI.Status | None = None) -> Any:
        """As `Wait`; returns the object that was received."""
        return self._finish(status)

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Whether it has completed."""
        return self._is_complete()

    def Cancel(self) -> None:
        """Takes back a receive without message."""

    def Free(self) -> None:
        """Forgets it."""

    cancel = Cancel

    def _tested(self, status: MPI.Status | None) -> tuple[bool, Any]:
        scheduler = running()
        if not self._is_complete():
            scheduler.poll()
        done = self._is_complete() and scheduler.schedule.has_completed(
            scheduler.task.rank, type(self).__name__
        )
        return (True, self._finish(status)) if done else (False, None)

    def _is_complete(self) -> bool:
        return True

    def _finish(self, status: MPI.Status | None) -> Any:
        self._ended = True

    def _peers(self) -> tuple[int, ...]:
        return ()

    @staticmethod
    def _wait_for_any(requests: Sequence[SimulatedRequest]) -> int:
        active = [at for at, one in enumerate(requests) if not one._ended]
        if not active:
            return int(MPI.UNDEFINED)
        world, site = running_world(), _site()
        schedule = world.scheduler.schedule
        if schedule.tries_orders and len(active) > 1:
            world.scheduler.poll()
        while True:
            complete = [at for at in active if requests[at]._is_complete()]
            if complete:
                return complete[schedule.choose_completed(world.rank, len(complete))]
            peers = {rank for at in active for rank in requests[at]._peers()}
            block(world, "request, Waitany", 0, sorted(peers), site)

    @classmethod
    def Waitall(cls, requests: Sequence[SimulatedRequest], statuses: Any = None) -> bool:
        """Waits for all."""
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[SimulatedRequest], statuses: Any = None) -> list[Any]:
        """Waits for all; returns the objects that were received."""
        given = statuses or [None] * len(requests)
        return [
            one._finish(status) for one, status in zip(_simulated(requests), given, strict=True)
        ]

    @classmethod
    def Waitany(cls, requests: Sequence[SimulatedRequest], status: MPI.Status | None = None) -> int:
        """Waits for one, and returns its index."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def waitany(
        cls, requests: Sequence[SimulatedRequest], status: MPI.Status | None = None
    ) -> tuple[int, Any]:
        """Waits for one; returns its index, and the object that was received."""
        requests = _simulated(requests)
        at = cls._wait_for_any(requests)
        found = requests[at]._finish(status) if at >= 0 else None
        return at, found

    @classmethod
    def Waitsome(
        cls, requests: Sequence[SimulatedRequest], statuses: Any = None
    ) -> list[int] | None:
        """Waits for one, as MPI allows; returns a list with its index, None if all have ended."""
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def waitsome(
        cls, requests: Sequence[SimulatedRequest], statuses: Any = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """As `Waitsome`, with a list of the object that was received."""
        at, found = cls.waitany(requests, statuses[0] if statuses else None)
        return ([at], [found]) if at >= 0 else (None, None)

    @classmethod
    def Testany(
        cls, requests: Sequence[SimulatedRequest], status: MPI.Status | None = None
    ) -> tuple[int, bool]:
        """The index of one that has completed, and whether there is one or all have ended."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def testany(
        cls, requests: Sequence[SimulatedRequest], status: MPI.Status | None = None
    ) -> tuple[int, bool, Any]:
        """As `Testany`, with the object that was received."""
        requests = _simulated(requests)
        active = [at for at, one in enumerate(requests) if not one._ended]
        schedule, rank = running().schedule, running_world().rank
        if active and not any(requests[at]._is_complete() for at in active):
            running().poll()
        complete = [at for at in active if requests[at]._is_complete()]
        if not complete or not schedule.has_completed(rank, "request, Testany"):
            return int(MPI.UNDEFINED), not active, None
        at = complete[schedule.choose_completed(rank, len(complete))]
        return at, True, requests[at]._finish(status)

    @classmethod
    def Testsome(
        cls, requests: Sequence[SimulatedRequest], statuses: Any = None
    ) -> list[int] | None:
        """A list with the index of one that has completed, or without; None if all have ended."""
        return cls.testsome(requests, statuses)[0]

    @classmethod
    def testsome(
        cls, requests: Sequence[SimulatedRequest], statuses: Any = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """As `Testsome`, with a list of the object that was received."""
        at, done, found = cls.testany(requests, statuses[0] if statuses else None)
        if at < 0:
            return (None, None) if done else ([], [])
        return [at], [found]

    @classmethod
    def Testall(cls, requests: Sequence[SimulatedRequest], statuses: Any = None) -> bool:
        """Whether all have completed."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    def testall(
        cls, requests: Sequence[SimulatedRequest], statuses: Any = None
    ) -> tuple[bool, list[Any] | None]:
        """Whether all have completed, and the objects that were received."""
        requests = _simulated(requests)
        if not all(one._is_complete() for one in requests):
            running().poll()
        if not all(one._is_complete() for one in requests):
            return False, None
        return True, cls.waitall(requests, statuses)


class _NullRequest(SimulatedRequest):
    """In place of MPI.REQUEST_NULL in a list."""

    _ended = True


def _simulated(requests: Sequence[Any]) -> list[SimulatedRequest]:
    return [_NullRequest() if one == MPI.REQUEST_NULL else one for one in requests]


class SendRequest(SimulatedRequest):
    """A send that was posted."""

    def __init__(self, world: SimulatedWorld, message: SimulatedMessage) -> None:
        self._world, self._message = world, message
        self._ended = False

    def _is_complete(self) -> bool:
        return self._message.buffered or self._message.receive is not None

    def _peers(self) -> tuple[int, ...]:
        return (self._message.dest,)

    def _finish(self, status: MPI.Status | None) -> None:
        message, world = self._message, self._world
        world.scheduler.computed()
        while not self._is_complete():
            block(world, message.title, message.group.number, self._peers(), message.site)
        if not self._ended:
            self._ended = True
            world.scheduler.mail.sent(message)


class ReceiveRequest(SimulatedRequest):
    """A receive that was posted; ``deliver`` gets the message, and returns the object."""

    def __init__(
        self,
        peers: Callable[[], tuple[int, ...]],
        world: SimulatedWorld,
        receive: PostedReceive,
        deliver: Callable[[SimulatedMessage, MPI.Status], Any],
    ) -> None:
        self._world, self._receive, self._deliver = world, receive, deliver
        self._peers = peers  # type: ignore[method-assign]
        self._ended = False

        self._cancelled = False

    def _is_complete(self) -> bool:
        return self._receive.message is not None or self._cancelled

    def Cancel(self) -> None:
        """Takes it back, if there is no message yet."""
        if not self._is_complete():
            self._world.scheduler.mail.cancel(self._receive)
            self._cancelled = True

    cancel = Cancel

    def _finish(self, status: MPI.Status | None) -> Any:
        receive, world = self._receive, self._world
        if self._ended:
            return None
        world.scheduler.computed()
        while not self._is_complete():
            block(world, receive.title, receive.group.number, self._peers(), receive.site)
        self._ended = True
        message = receive.message
        if message is None:
            if status is not None:
                status.Set_cancelled(True)
            return None
        with world.scheduler.uncounted():
            world.scheduler.mail.received(receive)
            about = status if status is not None else MPI.Status()
            value = self._deliver(message, about)
            about.Set_source(message.group.ranks.index(message.source))
            about.Set_tag(message.tag)
        return value


class CollectiveRequest(SimulatedRequest):
    """A collective that was posted; ``deliver`` gets its result."""

    def __init__(
        self, world: SimulatedWorld, call: Call, deliver: Callable[[Any], Any] = lambda found: None
    ) -> None:
        self._world, self._call, self._deliver = world, world.submit(call), deliver
        self._ended = False

    def _is_complete(self) -> bool:
        if not self._call.done:
            self._world.progress()
        return self._call.done

    def _peers(self) -> tuple[int, ...]:
        return self._call.missing()

    def _finish(self, status: MPI.Status | None) -> Any:
        found = self._world.join(self._call)
        if not self._ended:
            self._ended = True
            self._deliver(found)
        return None


class MatchedMessage:
    """A message that a matched probe has taken: its receive has completed."""

    def __init__(self, message: SimulatedMessage) -> None:
        self._message = message

    def _receive(self) -> PostedReceive:
        message, scheduler = self._message, running()
        receive = PostedReceive(
            message.dest, message.group, message.source, message.tag, scheduler.task.clock,
            _site(), "comm.mprobe",
        )  # fmt: skip
        scheduler.mail.match(receive, message)
        return receive

    def Recv(self, buf: Any, status: MPI.Status | None = None) -> None:
        """Receives it into a buffer."""
        self.Irecv(buf).Wait(status)

    def Irecv(self, buf: Any) -> SimulatedRequest:
        """Receives it into a buffer; the request has completed."""
        deliver = filling(buf)
        return ReceiveRequest(tuple, running_world(), self._receive(), deliver)

    def recv(self, status: MPI.Status | None = None) -> Any:
        """Receives its object."""
        return ReceiveRequest(tuple, running_world(), self._receive(), loaded).wait(status)

    def irecv(self) -> SimulatedRequest:
        """Receives its object; the request has completed."""
        return ReceiveRequest(tuple, running_world(), self._receive(), loaded)


def filling(buf: Any) -> Callable[[SimulatedMessage, MPI.Status], None]:
    return lambda message, status: buffers.unpack(message.data, buf, status)


def loaded(message: SimulatedMessage, status: MPI.Status) -> Any:
    describe(status, 0, 0, message.nbytes)
    return MPI.pickle.loads(message.data) if message.nbytes else None


class NullReceive(SimulatedRequest):
    """A receive from no rank (MPI.PROC_NULL), which has completed."""

    def _finish(self, status: MPI.Status | None) -> None:
        describe(status, MPI.PROC_NULL, MPI.ANY_TAG, 0)


def time_by_network(*kinds: type) -> None:
    """Makes the public methods of some classes `timed_by_network`."""
    for kind in kinds:
        for name, method in list(vars(kind).items()):
            if name[0] != "_" and isinstance(method, types.FunctionType):
                setattr(kind, name, timed_by_network(method))
            if name[0] != "_" and isinstance(method, classmethod):
                setattr(kind, name, classmethod(timed_by_network(method.__func__)))


time_by_network(SimulatedRequest, MatchedMessage)
