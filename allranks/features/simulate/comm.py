"""mpi4py's communicators and requests for simulated ranks, and the module that a cell imports.

Data is packed and reduced by MPI itself, in this process. A method stands for the rank that runs:
all ranks share the object MPI.COMM_WORLD.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Sequence
from functools import reduce as fold
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI

from allranks.collectives.arrays.libraries import ArrayHeader, to_dtype, to_numpy
from allranks.collectives.arrays.reductions import ReduceOp, check, name_of
from allranks.collectives.calls import guard
from allranks.collectives.calls.call import Call, Offer, Steps, nbytes_of
from allranks.collectives.calls.guard import Site, Spec
from allranks.collectives.ops import operations
from allranks.collectives.ops.communicator import Comm as RealComm
from allranks.collectives.world import current
from allranks.collectives.world.world import ALONE, Group
from allranks.errors import UsageError
from allranks.features.simulate import buffers
from allranks.features.simulate.events import ANY, Message, Receive
from allranks.features.simulate.messages import Mail
from allranks.features.simulate.scheduler import Scheduler, Wait
from allranks.features.simulate.world import SimulatedWorld, open_group, point_call

_ON_REAL_RANKS = "Leave out --simulate to run this cell on real ranks: %%distributed -n 4"
_TAGS, _HEAD_BYTES = 1 << 14, 256


def _world() -> SimulatedWorld:
    found = current()
    if not isinstance(found, SimulatedWorld):
        raise UsageError(
            "a communicator of simulated ranks can be used in their cells only, in the rank's own "
            "thread: found a call from elsewhere. Make the call in the cell itself"
        )
    return found


def running() -> Scheduler:
    """The scheduler of the rank that runs."""
    return _world().scheduler


def _site() -> Site:
    return guard.find(sys._getframe(2))


def _block(
    world: SimulatedWorld, title: str, number: int, peers: Iterable[int], site: Site
) -> None:
    """Waits for one of some ranks."""
    call = point_call(world, title, number, tuple(peers))
    call.site = site
    world.scheduler.block(Wait(call, lambda: call.peers, every=len(call.peers) == 1))


def _describe(status: MPI.Status | None, source: int, tag: int, nbytes: int) -> None:
    if status is not None:
        status.Set_source(source)
        status.Set_tag(tag)
        status.Set_error(MPI.SUCCESS)
        status.Set_elements(MPI.BYTE, nbytes)


class Request:
    """A request of a simulated rank, complete from the beginning unless a subclass waits."""

    _ended = False
    """Whether a wait or a test has ended it; a wait for any of several then ignores it."""

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
    def _wait_for_any(requests: Sequence[Request]) -> int:
        active = [at for at, one in enumerate(requests) if not one._ended]
        if not active:
            return int(MPI.UNDEFINED)
        world, site = _world(), _site()
        schedule = world.scheduler.schedule
        if schedule.tries_orders and len(active) > 1:
            world.scheduler.poll()
        while True:
            complete = [at for at in active if requests[at]._is_complete()]
            if complete:
                return complete[schedule.choose_completed(world.rank, len(complete))]
            peers = {rank for at in active for rank in requests[at]._peers()}
            _block(world, "request, Waitany", 0, sorted(peers), site)

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Waits for all."""
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: Any = None) -> list[Any]:
        """Waits for all; returns the objects that were received."""
        given = statuses or [None] * len(requests)
        return [one._finish(status) for one, status in zip(requests, given, strict=True)]

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: MPI.Status | None = None) -> int:
        """Waits for one, and returns its index."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def waitany(
        cls, requests: Sequence[Request], status: MPI.Status | None = None
    ) -> tuple[int, Any]:
        """Waits for one; returns its index, and the object that was received."""
        at = cls._wait_for_any(requests)
        found = requests[at]._finish(status) if at >= 0 else None
        return at, found

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Whether all have completed."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    def testall(
        cls, requests: Sequence[Request], statuses: Any = None
    ) -> tuple[bool, list[Any] | None]:
        """Whether all have completed, and the objects that were received."""
        if not all(one._is_complete() for one in requests):
            running().poll()
        if not all(one._is_complete() for one in requests):
            return False, None
        return True, cls.waitall(requests, statuses)


class SendRequest(Request):
    """A send that was posted."""

    def __init__(self, world: SimulatedWorld, message: Message) -> None:
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
            _block(world, message.title, message.group.number, self._peers(), message.site)
        if not self._ended:
            self._ended = True
            world.scheduler.mail.sent(message)


class ReceiveRequest(Request):
    """A receive that was posted; ``deliver`` gets the message, and returns the object."""

    def __init__(
        self,
        comm: Comm,
        world: SimulatedWorld,
        receive: Receive,
        deliver: Callable[[Message, MPI.Status], Any],
    ) -> None:
        self._comm, self._world, self._receive, self._deliver = comm, world, receive, deliver
        self._ended = False
        self._value: Any = None

    def _is_complete(self) -> bool:
        return self._receive.message is not None

    def _peers(self) -> tuple[int, ...]:
        return self._comm._peers(self._receive.source)

    def Cancel(self) -> None:
        """Takes it back, if there is no message yet."""
        self._world.scheduler.mail.cancel(self._receive)

    def _finish(self, status: MPI.Status | None) -> Any:
        receive, world = self._receive, self._world
        if self._ended:
            return self._value
        world.scheduler.computed()
        while not self._is_complete():
            _block(world, receive.title, receive.group.number, self._peers(), receive.site)
        self._ended = True
        message = receive.message
        assert message is not None
        with world.scheduler.uncounted():
            world.scheduler.mail.received(receive)
            about = status if status is not None else MPI.Status()
            self._value = self._deliver(message, about)
            about.Set_source(message.group.ranks.index(message.source))
            about.Set_tag(message.tag)
        return self._value


class CollectiveRequest(Request):
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
    """A message that a matched probe has taken."""

    def __init__(self, comm: Comm, message: Message) -> None:
        self._comm, self._message = comm, message

    def _receive(self) -> Receive:
        message, scheduler = self._message, running()
        receive = Receive(
            message.dest, message.group, message.source, message.tag, scheduler.task.clock,
            _site(), "comm.mprobe",
        )  # fmt: skip
        scheduler.mail.match(receive, message)
        return receive

    def Recv(self, buf: Any, status: MPI.Status | None = None) -> None:
        """Receives it into a buffer."""
        self.Irecv(buf).Wait(status)

    def Irecv(self, buf: Any) -> Request:
        """Receives it into a buffer; the request has completed."""
        deliver = _filling(buf)
        return ReceiveRequest(self._comm, _world(), self._receive(), deliver)

    def recv(self, status: MPI.Status | None = None) -> Any:
        """Receives its object."""
        return ReceiveRequest(self._comm, _world(), self._receive(), _object).wait(status)

    def irecv(self) -> Request:
        """Receives its object; the request has completed."""
        return ReceiveRequest(self._comm, _world(), self._receive(), _object)


def _filling(buf: Any) -> Callable[[Message, MPI.Status], None]:
    return lambda message, status: buffers.unpack(message.data, buf, status)


def _object(message: Message, status: MPI.Status) -> Any:
    _describe(status, 0, 0, message.nbytes)
    return MPI.pickle.loads(message.data) if message.nbytes else None


class Comm:
    """A communicator of simulated ranks, with mpi4py's methods."""

    _numbered: ClassVar[dict[int, Comm]] = {}

    def __init__(self, number: int, name: str = "", lasting: bool = False) -> None:
        self._number, self.name, self._lasting = number, name, lasting

    # Its ranks.

    def _group(self) -> Group:
        found = _world().groups.get(self._number)
        if found is None:
            raise UsageError(
                "a communicator from Split(), Dup() or Create_…() lasts until an error or an "
                "interrupt ends its epoch, or Free(). Make it again, as in the cell that made it."
            )
        return found

    def Get_rank(self) -> int:
        """This rank's number in it."""
        return self._group().me

    def Get_size(self) -> int:
        """The number of its ranks."""
        return self._group().size

    @property
    def rank(self) -> int:
        """This rank's number in it."""
        return self._group().me

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return self._group().size

    @property
    def _world(self) -> SimulatedWorld:
        return _world()

    def Get_name(self) -> str:
        """Its name."""
        return self.name

    def Set_name(self, name: str) -> None:
        """Names it."""
        self.name = name

    def Is_inter(self) -> bool:
        """False: there are no intercommunicators."""
        return False

    def Is_intra(self) -> bool:
        """True."""
        return True

    is_inter, is_intra = False, True

    def Get_topology(self) -> int:
        """No topology."""
        return int(MPI.UNDEFINED)

    def Set_errhandler(self, errhandler: Any) -> None:
        """Does nothing: errors are exceptions."""

    def Get_attr(self, keyval: int) -> Any:
        """Those of real communicators."""
        return MPI.COMM_WORLD.Get_attr(keyval)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Comm) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        if not self._lasting:
            raise ValueError("a communicator that the program has made cannot be pickled")
        return _lasting, (self._number == ALONE,)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(MPI.Intracomm, name):
            raise UsageError(
                f"expected a call that simulated ranks have, found comm.{name}. {_ON_REAL_RANKS}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _peers(self, peer: int) -> tuple[int, ...]:
        """A peer's rank in the world; all other ranks for ANY."""
        group = self._group()
        if peer != ANY:
            return (peer,)
        me = group.ranks[group.me]
        return tuple(rank for rank in group.ranks if rank != me)

    # Messages.

    def _send(
        self, op: str, data: Any, nbytes: int, dest: int, tag: int, buffered: bool | None = None
    ) -> Request:
        world, group = _world(), self._group()
        world.scheduler.computed()
        if dest == MPI.PROC_NULL:
            return Request()
        if not 0 <= dest < group.size:
            raise MPI.Exception(MPI.ERR_RANK)
        message = world.scheduler.mail.send(
            group, group.ranks[dest], tag, data, nbytes, guard.find(sys._getframe(2)), f"comm.{op}",
            buffered=buffered,
        )  # fmt: skip
        return SendRequest(world, message)

    def _receive(
        self, op: str, deliver: Callable[[Message, MPI.Status], Any], source: int, tag: int
    ) -> Request:
        world, group = _world(), self._group()
        world.scheduler.computed()
        if source == MPI.PROC_NULL:
            return _FromNowhere()
        if source != MPI.ANY_SOURCE and not 0 <= source < group.size:
            raise MPI.Exception(MPI.ERR_RANK)
        receive = world.scheduler.mail.receive(
            group,
            ANY if source == MPI.ANY_SOURCE else group.ranks[source],
            ANY if tag == MPI.ANY_TAG else tag,
            guard.find(sys._getframe(2)),
            f"comm.{op}",
        )
        return ReceiveRequest(self, world, receive, deliver)

    def Recv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:  # fmt: skip
        """MPI_Recv."""
        self._receive("Recv", _filling(buf), source, tag).Wait(status)

    def Irecv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Request:
        """MPI_Irecv."""
        return self._receive("Irecv", _filling(buf), source, tag)

    def recv(
        self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:  # fmt: skip
        """Receives a picklable object."""
        return self._receive("recv", _object, source, tag).wait(status)

    def irecv(
        self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> Request:
        """Posts a receive of a picklable object."""
        return self._receive("irecv", _object, source, tag)

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE, recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:  # fmt: skip
        """MPI_Sendrecv."""
        received = self._receive("Sendrecv", _filling(recvbuf), source, recvtag)
        data = buffers.packed(sendbuf) if dest != MPI.PROC_NULL else bytearray()
        sent = self._send("Sendrecv", data, len(data), dest, sendtag)
        received.Wait(status)
        sent.Wait()

    def Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG, status: MPI.Status | None = None,
    ) -> None:  # fmt: skip
        """MPI_Sendrecv_replace."""
        self.Sendrecv(buf, dest, sendtag, buf, source, recvtag, status)

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE, recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:  # fmt: skip
        """Sends an object and receives another one."""
        data = MPI.pickle.dumps(sendobj)
        sent = self._send("sendrecv", data, len(data), dest, sendtag)
        received = self._receive("sendrecv", _object, source, recvtag).wait(status)
        sent.Wait()
        return received

    def _look(self, op: str, source: int, tag: int) -> Message | None:
        """The first message that a receive would take, if there is one now."""
        world, group = _world(), self._group()
        scheduler = world.scheduler
        scheduler.computed()
        whom = ANY if source == MPI.ANY_SOURCE else group.ranks[source]
        wanted = Receive(
            scheduler.task.rank, group, whom, ANY if tag == MPI.ANY_TAG else tag,
            scheduler.task.clock, guard.find(sys._getframe(2)), f"comm.{op}",
        )  # fmt: skip
        found: list[Message] = scheduler.mail.candidates(wanted)
        if not found:
            scheduler.poll()
            found = scheduler.mail.candidates(wanted)
        if not found or not scheduler.schedule.has_completed(scheduler.task.rank, op):
            return None
        return found[scheduler.schedule.choose_message(wanted, found) if len(found) > 1 else 0]

    def _probed(self, op: str, source: int, tag: int, status: MPI.Status | None) -> Message:
        # Its wait is a receive that is taken back: then a deadlock is found.
        world, group = _world(), self._group()
        scheduler = world.scheduler
        while (found := self._look(op, source, tag)) is None:
            waiting = self._receive(op, _object, source, tag)
            assert isinstance(waiting, ReceiveRequest)
            receive = waiting._receive
            while receive.message is None:
                _block(world, receive.title, group.number, waiting._peers(), receive.site)
            found = receive.message
            scheduler.mail.put_back(found)
            break
        _describe(status, group.ranks.index(found.source), found.tag, found.nbytes)
        return found

    def Probe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> bool:  # fmt: skip
        """MPI_Probe."""
        self._probed("Probe", source, tag, status)
        return True

    probe = Probe

    def Iprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> bool:  # fmt: skip
        """MPI_Iprobe; the other ranks run meanwhile."""
        found = self._look("Iprobe", source, tag)
        if found is not None:
            _describe(status, self._group().ranks.index(found.source), found.tag, found.nbytes)
        return found is not None

    iprobe = Iprobe

    def Mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> MatchedMessage:  # fmt: skip
        """MPI_Mprobe."""
        found = self._probed("Mprobe", source, tag, status)
        running().mail.take(found)
        return MatchedMessage(self, found)

    mprobe = Mprobe

    def Improbe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> MatchedMessage | None:  # fmt: skip
        """MPI_Improbe."""
        found = self._look("Improbe", source, tag)
        if found is None:
            return None
        _describe(status, self._group().ranks.index(found.source), found.tag, found.nbytes)
        running().mail.take(found)
        return MatchedMessage(self, found)

    improbe = Improbe

    # Collectives of objects: those of real communicators, whose methods call `_group` and `_world`.

    bcast = RealComm.bcast
    gather = RealComm.gather
    allgather = RealComm.allgather
    scatter = RealComm.scatter
    alltoall = RealComm.alltoall
    reduce = RealComm.reduce
    scan = RealComm.scan
    exscan = RealComm.exscan
    _rooted: Any = RealComm._rooted
    _objects = RealComm._objects
    _one_a_rank = RealComm._one_a_rank

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Reduces picklable objects to every rank, in the order of the ranks."""
        # Reduced once, and not on each of the ranks, which would unpickle all objects.
        data = operations.dumps(sendobj)
        call = self._exchange(
            "allreduce",
            data,
            lambda parts: operations.dumps(fold(op, map(operations.loads, parts))),
        )
        return operations.loads(self._world.run(call))

    # Collectives of buffers.

    def _exchange(
        self,
        op: str,
        part: Any,
        make: Callable[[list[Any]], Any],
        root: int | None = None,
        nbytes: int | None = None,
    ) -> Call:
        """A call whose result is what ``make`` makes of all ranks' parts."""
        group = self._group()
        whom = -1 if root is None else group.ranks[self._rooted(op, root)]
        size = nbytes_of(part) if nbytes is None else nbytes

        def steps(call: Call) -> Steps[Any]:
            call.transport = "shared"
            slot = call.agreement.upcoming()  # type: ignore[attr-defined]
            slot.bring(group.me, part, make)
            yield from call.agreed(Offer(size))
            return slot.result

        return group.call(Spec(f"comm.{op}", root=whom), op, size, steps)

    def Barrier(self) -> None:
        """MPI_Barrier."""
        self._world.run(self._exchange("Barrier", None, lambda parts: None))

    barrier = Barrier

    def Ibarrier(self) -> Request:
        """MPI_Ibarrier."""
        return CollectiveRequest(self._world, self._exchange("Ibarrier", None, lambda parts: None))

    # Windows, files, processes.

    def Abort(self, errorcode: int = 0) -> None:
        """Ends this rank's part in the cell."""
        raise SystemExit(errorcode or 1)

    def Free(self) -> None:
        """MPI_Comm_free."""
        if self._lasting:
            raise UsageError(
                "comm.Free() needs a communicator that the program has made: this one lasts as "
                "long as the ranks do."
            )
        _world().close(self._number)

    Disconnect = Free

    def free(self) -> None:
        """`Free`, if the communicator can be freed."""
        if not self._lasting and self._number in _world().groups:
            self.Free()

    # Communicators.

    def _made(self, op: str, part: Any, make: Callable[[list[Any]], Any], kind: Any = None) -> Any:
        """A communicator of some ranks: ``make`` returns them in order, for each rank."""
        world, parent = _world(), self._group()
        call = self._exchange(
            op,
            (world.made, part),
            lambda parts: (max(made for made, _ in parts) + 1, make([one for _, one in parts])),
            nbytes=8,
        )
        number, members = world.run(call)
        world.made = number
        places = members[parent.me]
        ranks = tuple(parent.ranks[place] for place in places)
        world.run(open_group(parent, Spec(f"comm.{op} group"), world, number, ranks))
        return (kind or Intracomm)(number) if places else MPI.COMM_NULL

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """MPI_Split: a communicator for each colour; the null communicator for UNDEFINED."""
        if color < 0 and color != MPI.UNDEFINED:
            raise UsageError(
                f"comm.Split needs a colour from 0 on, or MPI.UNDEFINED: found color={color}."
            )

        def members(parts: list[Any]) -> list[list[int]]:
            ordered: dict[int, list[int]] = {}
            for place in sorted(range(len(parts)), key=lambda place: (parts[place][1], place)):
                ordered.setdefault(parts[place][0], []).append(place)
            return [[] if of == MPI.UNDEFINED else ordered[of] for of, _ in parts]

        return self._made("Split", (int(color), int(key)), members)

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        """MPI_Comm_split_type: the ranks of each host."""
        world = _world()
        return self.Split(world.hosts[world.rank], key)

    def Dup(self, info: Any = None) -> Any:
        """MPI_Comm_dup."""
        return self._made("Dup", None, lambda parts: [list(range(len(parts)))] * len(parts))

    Clone = Dup

    def Idup(self, info: Any = None) -> tuple[Any, Request]:
        """MPI_Comm_idup; the communicator exists at once, and the request has completed."""
        return self.Dup(info), Request()

    def Get_group(self) -> RankGroup:
        """MPI_Comm_group."""
        return RankGroup(self._group().ranks)

    @property
    def group(self) -> RankGroup:
        """Its ranks."""
        return self.Get_group()

    def Create(self, group: RankGroup) -> Any:
        """MPI_Comm_create: a communicator of the ranks of a group."""
        here = self._group().ranks
        places = [here.index(rank) for rank in group.ranks]
        mine = places if self._group().me in places else []
        return self._made("Create", mine, lambda parts: parts)

    def Create_group(self, group: RankGroup, tag: int = 0) -> Any:
        """MPI_Comm_create_group: as `Create`, called by the ranks of the group only."""
        world = _world()
        if world.rank not in group.ranks:
            return MPI.COMM_NULL
        numbers = [self._number, tag, *group.ranks]
        # The same number on all members, of no other group.
        number = (1 << 40) + hash(tuple(numbers)) % (1 << 39)
        world.open(number, group.ranks, None)
        made = Intracomm(number)
        made.Barrier()
        return made

    def Create_cart(self, dims: Sequence[int], periods: Any = None, reorder: bool = False) -> Any:
        """MPI_Cart_create: a grid; the null communicator on ranks outside of it."""
        extents = [int(dim) for dim in np.atleast_1d(dims)]
        around = [False] * len(extents) if periods is None else list(np.atleast_1d(periods))
        if len(around) == 1:
            around *= len(extents)
        count = int(np.prod(extents))
        if count > self.Get_size():
            raise MPI.Exception(MPI.ERR_DIMS)

        def members(parts: list[Any]) -> list[list[int]]:
            return [list(range(count)) if at < count else [] for at in range(len(parts))]

        kind = lambda number: Cartcomm(number, extents, [bool(one) for one in around])  # noqa: E731
        return self._made("Create_cart", None, members, kind)


class _FromNowhere(Request):
    def _finish(self, status: MPI.Status | None) -> None:
        _describe(status, MPI.PROC_NULL, MPI.ANY_TAG, 0)


class Intracomm(Comm):
    """The communicators of simulated ranks."""


class Cartcomm(Intracomm):
    """A grid of simulated ranks."""

    def __init__(self, number: int, dims: list[int], periods: list[bool]) -> None:
        super().__init__(number)
        self.dims, self.periods = dims, periods

    @property
    def dim(self) -> int:
        """The number of its dimensions."""
        return len(self.dims)

    ndim = dim

    @property
    def coords(self) -> list[int]:
        """This rank's coordinates."""
        return self.Get_coords(self.Get_rank())

    @property
    def topo(self) -> tuple[list[int], list[bool], list[int]]:
        """Its extents, which of them are periodic, and this rank's coordinates."""
        return self.dims, self.periods, self.coords

    def Get_topo(self) -> tuple[list[int], list[bool], list[int]]:
        """Its extents, which of them are periodic, and this rank's coordinates."""
        return self.topo

    def Get_topology(self) -> int:
        """A grid."""
        return int(MPI.CART)

    def Get_dim(self) -> int:
        """The number of its dimensions."""
        return self.dim

    def Get_coords(self, rank: int) -> list[int]:
        """The coordinates of a rank."""
        return [int(one) for one in np.unravel_index(rank, self.dims)]

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """The rank at some coordinates."""
        found = self._at(list(coords))
        if found == MPI.PROC_NULL:
            raise MPI.Exception(MPI.ERR_ARG)
        return found

    def _at(self, coords: list[int]) -> int:
        for at, (one, dim, around) in enumerate(zip(coords, self.dims, self.periods, strict=True)):
            if not 0 <= one < dim and not around:
                return int(MPI.PROC_NULL)
            coords[at] = one % dim
        return int(np.ravel_multi_index(coords, self.dims))

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """The ranks from which and to which data goes along a dimension."""
        here = self.coords
        pair = []
        for step in (-disp, disp):
            there = list(here)
            there[direction] += step
            pair.append(self._at(there))
        return pair[0], pair[1]

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """MPI_Cart_sub: a grid of the dimensions that remain."""
        remain = [bool(one) for one in remain_dims]
        here = self.coords
        kept = [dim for dim, stays in zip(self.dims, remain, strict=True) if stays]
        around = [one for one, stays in zip(self.periods, remain, strict=True) if stays]
        fixed = tuple(one for one, stays in zip(here, remain, strict=True) if not stays)

        def members(parts: list[Any]) -> list[list[int]]:
            ordered: dict[Any, list[int]] = {}
            for place, part in enumerate(parts):
                ordered.setdefault(part, []).append(place)
            return [ordered[part] for part in parts]

        return self._made("Sub", fixed, members, lambda number: Cartcomm(number, kept, around))


class RankGroup:
    """A group of simulated ranks, in order."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(ranks)

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's place in it."""
        me = _world().rank
        return self.ranks.index(me) if me in self.ranks else int(MPI.UNDEFINED)

    def Get_size(self) -> int:
        """The number of its ranks."""
        return self.size

    def Get_rank(self) -> int:
        """This rank's place in it."""
        return self.rank

    def Incl(self, ranks: Iterable[int]) -> RankGroup:
        """The group of some of its ranks."""
        return RankGroup(self.ranks[rank] for rank in ranks)

    def Excl(self, ranks: Iterable[int]) -> RankGroup:
        """The group without some of its ranks."""
        out = set(ranks)
        return RankGroup(rank for at, rank in enumerate(self.ranks) if at not in out)

    def Free(self) -> None:
        """Forgets it."""

    @staticmethod
    def Translate_ranks(
        group1: RankGroup, ranks1: Sequence[int] | None, group2: RankGroup
    ) -> list[int]:
        """The places in another group."""
        chosen = range(group1.size) if ranks1 is None else ranks1
        return [
            group2.ranks.index(group1.ranks[at]) if group1.ranks[at] in group2.ranks
            else int(MPI.UNDEFINED)
            for at in chosen
        ]  # fmt: skip


def _sending(name: str, buffered: bool | None) -> None:
    """Adds the four forms of a send: of a buffer or an object, blocking or posted."""

    def post_buffer(self: Comm, buf: Any, dest: int, tag: int = 0) -> Request:
        data = buffers.packed(buf) if dest != MPI.PROC_NULL else bytearray()
        return self._send(f"I{name}", data, len(data), dest, tag, buffered)

    def post_object(self: Comm, obj: Any, dest: int, tag: int = 0) -> Request:
        data = MPI.pickle.dumps(obj)
        return self._send(f"i{name}", data, len(data), dest, tag, buffered)

    def send_buffer(self: Comm, buf: Any, dest: int, tag: int = 0) -> None:
        data = buffers.packed(buf) if dest != MPI.PROC_NULL else bytearray()
        self._send(name.capitalize(), data, len(data), dest, tag, buffered).Wait()

    def send_object(self: Comm, obj: Any, dest: int, tag: int = 0) -> None:
        data = MPI.pickle.dumps(obj)
        self._send(name, data, len(data), dest, tag, buffered).Wait()

    for form, method in (
        (f"I{name}", post_buffer),
        (f"i{name}", post_object),
        (name.capitalize(), send_buffer),
        (name, send_object),
    ):
        setattr(Comm, form, method)


for _name, _buffered in (("send", None), ("ssend", False), ("bsend", True), ("rsend", None)):
    _sending(_name, _buffered)


# Collectives of buffers: a function returns the part of a rank, what is made of all parts, and what
# this rank does with the result.

Plan = tuple[Any, Callable[[list[Any]], Any], Callable[[Any], object], int | None]


def _bytes_of(argument: Any) -> Any:
    return buffers.read(argument).data.copy()


def _fill(argument: Any, data: Any) -> None:
    """Writes bytes to the beginning of a buffer, as MPI does; raises if they do not fit."""
    target = buffers.read(argument).data
    if data.nbytes > target.nbytes:
        raise MPI.Exception(MPI.ERR_TRUNCATE)
    target[: data.nbytes] = data


def _scattered(pieces: list[Any], argument: Any) -> None:
    for target, data in zip(buffers.read(argument).pieces(len(pieces)), pieces, strict=True):
        if data.nbytes > target.nbytes:
            raise MPI.Exception(MPI.ERR_TRUNCATE)
        target[: data.nbytes] = data


def _bcast(comm: Comm, buf: Any, root: int = 0) -> Plan:
    # MPI packs, because the datatype may be of any kind.
    mine = buffers.packed(buf) if comm.rank == root else None

    def take(data: Any) -> None:
        if comm.rank != root:
            buffers.unpack(data, buf, MPI.Status())

    return mine, lambda parts: parts[root], take, root


def _gather(comm: Comm, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
    here, size = comm.rank == root, comm.size
    if buffers.is_in_place(sendbuf):
        mine = buffers.read(recvbuf).pieces(size)[comm.rank].copy()
    else:
        mine = _bytes_of(sendbuf)
    return mine, list, lambda parts: _scattered(parts, recvbuf) if here else None, root


def _scatter(comm: Comm, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
    here, size = comm.rank == root, comm.size
    mine = [one.copy() for one in buffers.read(sendbuf).pieces(size)] if here else None

    def take(pieces: Any) -> None:
        if not buffers.is_in_place(recvbuf):
            _fill(recvbuf, pieces[comm.rank])

    return mine, lambda parts: parts[root], take, root


def _allgather(comm: Comm, sendbuf: Any, recvbuf: Any) -> Plan:
    if buffers.is_in_place(sendbuf):
        mine = buffers.read(recvbuf).pieces(comm.size)[comm.rank].copy()
    else:
        mine = _bytes_of(sendbuf)
    return mine, list, lambda parts: _scattered(parts, recvbuf), None


def _alltoall(comm: Comm, sendbuf: Any, recvbuf: Any) -> Plan:
    source = recvbuf if buffers.is_in_place(sendbuf) else sendbuf
    mine = [one.copy() for one in buffers.read(source).pieces(comm.size)]

    def take(table: Any) -> None:
        _scattered([row[comm.rank] for row in table], recvbuf)

    return mine, list, take, None


def _own(sendbuf: Any, recvbuf: Any) -> buffers.Buffer:
    return buffers.read(recvbuf if buffers.is_in_place(sendbuf) else sendbuf)


def _reduce(comm: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> Plan:
    here, size, own = comm.rank == root, comm.size, _own(sendbuf, recvbuf)
    order = buffers.order_of_reduce(own.data.nbytes, own.itemsize, size)

    def make(parts: list[Any]) -> Any:
        if order == "tree":
            # Open MPI's tree has the root in the place of the first rank.
            parts = list(parts)
            parts[0], parts[root] = parts[root], parts[0]
        return buffers.combine(parts, own, op, order)

    return own.data.copy(), make, lambda data: _fill(recvbuf, data) if here else None, root


def _allreduce(comm: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Plan:
    own = _own(sendbuf, recvbuf)
    order = buffers.order_of_allreduce(own.data.nbytes, own.itemsize, comm.size)
    if buffers.is_in_place(sendbuf):
        order = "tree"
    return (
        own.data.copy(),
        lambda parts: buffers.combine(parts, own, op, order),
        lambda data: _fill(recvbuf, data),
        None,
    )


def _reduce_scatter_block(comm: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Plan:
    own, me, size = _own(sendbuf, recvbuf), comm.rank, comm.size

    def take(data: Any) -> None:
        step = data.nbytes // size
        _fill(recvbuf, data[me * step : (me + 1) * step])

    return own.data.copy(), lambda parts: buffers.combine(parts, own, op, "tree"), take, None


def _reduce_scatter(
    comm: Comm, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM
) -> Plan:
    own, me, size = _own(sendbuf, recvbuf), comm.rank, comm.size
    counts = recvcounts
    if counts is None:
        counts = [own.data.nbytes // own.itemsize // size] * size
    starts = list(accumulate(counts, initial=0))

    def take(data: Any) -> None:
        _fill(recvbuf, data[starts[me] * own.itemsize : starts[me + 1] * own.itemsize])

    return own.data.copy(), lambda parts: buffers.combine(parts, own, op, "tree"), take, None


def _scanned(comm: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op, *, inclusive: bool) -> Plan:
    own, me = _own(sendbuf, recvbuf), comm.rank

    def make(parts: list[Any]) -> list[Any]:
        found = [parts[0].copy()]
        for part in parts[1:]:
            found.append(buffers.combine([found[-1], part], own, op))
        return found

    def take(found: Any) -> None:
        if inclusive or me:
            _fill(recvbuf, found[me if inclusive else me - 1])

    return own.data.copy(), make, take, None


def _scan(comm: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Plan:
    return _scanned(comm, sendbuf, recvbuf, op, inclusive=True)


def _exscan(comm: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Plan:
    return _scanned(comm, sendbuf, recvbuf, op, inclusive=False)


def _collective(name: str, plan: Any) -> None:
    """Adds the two forms of a collective of buffers: blocking, and posted."""

    def blocking(self: Comm, *arguments: Any, **options: Any) -> None:
        part, make, take, root = plan(self, *arguments, **options)
        take(self._world.run(self._exchange(name, part, make, root)))

    def posted(self: Comm, *arguments: Any, **options: Any) -> Request:
        part, make, take, root = plan(self, *arguments, **options)
        call = self._exchange(f"I{name.lower()}", part, make, root)
        return CollectiveRequest(self._world, call, take)

    setattr(Comm, name, blocking)
    setattr(Comm, f"I{name.lower()}", posted)


for _name, _plan in {
    **{"Bcast": _bcast, "Gather": _gather, "Gatherv": _gather, "Scatter": _scatter},
    **{"Scatterv": _scatter, "Allgather": _allgather, "Allgatherv": _allgather},
    **{"Alltoall": _alltoall, "Alltoallv": _alltoall, "Reduce": _reduce},
    **{"Allreduce": _allreduce, "Reduce_scatter": _reduce_scatter, "Scan": _scan},
    **{"Reduce_scatter_block": _reduce_scatter_block, "Exscan": _exscan},
}.items():
    _collective(_name, _plan)


WORLD = Intracomm(0, "MPI_COMM_WORLD", lasting=True)
SELF = Intracomm(ALONE, "MPI_COMM_SELF", lasting=True)


def _lasting(alone: bool) -> Comm:
    return SELF if alone else WORLD


_REFUSED = ("Win", "File", "Intercomm", "Graphcomm", "Distgraphcomm", "Prequest", "Open_port")


class SimulatedMPI(types.ModuleType):
    """``mpi4py.MPI`` as a cell of simulated ranks imports it; the rest is mpi4py's own."""

    def __init__(self) -> None:
        super().__init__("mpi4py.MPI", MPI.__doc__)
        self.COMM_WORLD, self.COMM_SELF = WORLD, SELF
        self.Comm, self.Intracomm, self.Cartcomm = Comm, Intracomm, Cartcomm
        self.Request, self.Group, self.Message = Request, RankGroup, MatchedMessage
        self.Wtime = wtime
        self.Init = self.Finalize = lambda: None

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED:
            raise UsageError(
                f"expected what simulated ranks have of MPI, found MPI.{name}. {_ON_REAL_RANKS}"
            )
        return getattr(MPI, name)


def wtime() -> float:
    """The simulated time of this rank, in seconds since its cell began."""
    scheduler = running()
    scheduler.computed()
    return scheduler.task.clock


def send(array: Any, dest: int, tag: int = 0, *, name: str | None = None) -> None:
    """As `allranks.collectives.send`."""
    _check_peer(dest, tag)
    source, _ = to_numpy(array)
    check(ReduceOp.Sum, source.dtype)
    head = ArrayHeader(name_of(source.dtype), source.shape).pack(_HEAD_BYTES)
    data = np.concatenate([head, source.reshape(-1).view(np.uint8)])
    WORLD._send("send", data, source.nbytes, dest, _TAGS + tag).Wait()


def recv(source: int, tag: int = 0, *, like: Any = None, name: str | None = None) -> Any:
    """As `allranks.collectives.recv`."""
    _check_peer(source, tag)

    def deliver(message: Message, status: MPI.Status) -> Any:
        head = ArrayHeader.unpack(message.data[:_HEAD_BYTES])
        return message.data[_HEAD_BYTES:].view(to_dtype(head.dtype)).reshape(head.shape)

    found = WORLD._receive("recv", deliver, source, _TAGS + tag).wait()
    return found if like is None else to_numpy(like)[1](found)


def _check_peer(peer: Any, tag: Any) -> None:
    world = _world()
    if not (0 <= peer < world.size and peer != world.rank and 0 <= tag < _TAGS):
        raise UsageError(
            f"send and recv need another rank, from 0 to {world.size - 1}, and a tag below "
            f"{_TAGS}: found rank {peer!r:.60} (this is rank {world.rank}), tag {tag!r:.60}."
        )


def begin(scheduler: Scheduler) -> None:
    """Gives a cell's scheduler its messages."""
    scheduler.mail = Mail(scheduler)
