"""Sends and receives of `comm`, and its requests and operations, whose waits can be interrupted.

MPI.Request, MPI.Prequest and MPI.Op have stand-ins here. A function of an MPI.Op may raise:
mpi4py would end the process, and MPI the other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import starmap
from typing import Any, Self, TypeVar

from mpi4py import MPI

from allranks.collectives.calls.call import PointCall, Steps
from allranks.collectives.calls.guard import Spec
from allranks.collectives.mpi.transport import complete
from allranks.collectives.world import World
from allranks.collectives.world.world import Group
from allranks.errors import StaleHandle


class StandIn(type):
    """The metaclass of classes that replace mpi4py's own under their names. Objects that mpi4py or
    another library has made are instances of the class, too. A class names in ``plain`` the class
    that it replaces; its subclasses name none.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        plain = cls.__dict__.get("plain")
        return isinstance(instance, plain) if plain else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        plain = cls.__dict__.get("plain")
        return issubclass(subclass, plain) if plain else super().__subclasscheck__(subclass)


_raised: list[BaseException] = []


class Op(MPI.Op, metaclass=StandIn):
    """MPI.Op with the same methods."""

    plain = MPI.Op

    @classmethod
    def Create(cls, function: Callable[..., Any], commute: bool = False) -> Self:
        """MPI_Op_create. The call that reduces raises the exception of ``function``."""

        @wraps(function)
        def kept(first: Any, second: Any, datatype: Any = None) -> Any:
            try:
                return function(first, second, datatype)
            except BaseException as error:
                if datatype is None:  # called for two objects, not by MPI
                    raise
                _raised.append(error)

        return super().Create(kept, commute)

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """MPI_Reduce_local; raises the exception of the function."""
        super().Reduce_local(inbuf, inoutbuf)
        raise_kept()


def raised() -> BaseException | None:
    """The exception of an `Op`'s function, once."""
    found = _raised[0] if _raised else None
    _raised.clear()
    return found


def raise_kept() -> None:
    if (error := raised()) is not None:
        raise error


T = TypeVar("T")
Status = MPI.Status | None
Raw = MPI.Intracomm
"""MPI's own calls, without the overrides of our subclasses."""
post_send: Callable[..., MPI.Request] = Raw.Isend
"""Posts the message of each blocking send. `allranks.grading` replaces it while it records a
program: then a send ends only when it is received."""


REFUSED_ARGUMENTS = TypeError, ValueError, LookupError, BufferError
"""Exceptions of mpi4py for arguments that it cannot pass to MPI."""


class PointToPoint(Raw):
    """The methods of `Comm` for two ranks."""

    _world: World
    _number: int
    _epoch: int | None = None

    def bind(self, world: World, number: int, epoch: int | None = None) -> None:
        self._world, self._number, self._epoch = world, number, epoch

    @property
    def stale(self) -> bool:
        """Whether its epoch is over; the communicators of all ranks and of one rank stay."""
        return self._epoch is not None and self._epoch != self._world.epoch

    def _group(self) -> Group:
        if self.stale:
            raise StaleHandle(
                "a communicator from Split(), Dup() or Create_…() lasts until an error or an "
                f"interrupt ends its epoch: this one is of epoch {self._epoch}, and it is "
                f"{self._world.epoch} now. Make it again, as in the cell that made it."
            )
        found = self._world.groups.get(self._number)
        if found is None:
            raise MPI.Exception(MPI.ERR_COMM)
        return found

    def _used(self) -> Group:
        """The group, for a call after which messages may be on their way."""
        self._world.traffic.add(self._number)
        return self._group()

    def _made_by_all(self, op: str, post: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Makes a collective call of MPI that does not wait; not after one that was refused."""
        group, world = self._used(), self._world
        if world.dirty:
            world.check_clean(PointCall(group.agreement, Spec(f"comm.{op}"), op, ()))
        try:
            return post(self, *arguments, **options)
        except (*REFUSED_ARGUMENTS, MPI.Exception) as error:
            # Other ranks may have made it, and would take the next call for it.
            if group.size > 1:
                call = PointCall(group.agreement, Spec(f"comm.{op}"), op, ())
                where = f"{call.spec.title} at {call.site.place}"
                world.spoil(f"cannot make {where} ({type(error).__name__})")
            raise

    def peers(self, peer: int) -> tuple[int, ...]:
        """A peer as ranks of the world; all other ranks for MPI.ANY_SOURCE or PROC_NULL."""
        ranks = self._group().ranks
        if 0 <= peer < len(ranks):
            return (ranks[peer],)
        return tuple(rank for rank in ranks if rank != self._world.rank)

    def point(self, op: str, peer: int, steps: Callable[[PointCall], Steps[T]]) -> T:
        """Runs a call that waits for one rank, or for any."""
        call = PointCall(self._used().agreement, Spec(f"comm.{op}"), op, self.peers(peer))
        call.transport = "mpi"
        call.steps = steps(call)
        result: T = self._world.run(call)
        call.buffers = ()  # the journal keeps the call
        return result

    def keep(self, requests: list[MPI.Request]) -> None:
        """Keeps requests and their buffers while MPI may write to them."""
        self._world.held_requests[id(requests)] = requests

    def release(self, requests: list[MPI.Request]) -> None:
        del self._world.held_requests[id(requests)]

    def _post(
        self,
        op: str,
        peer: int,
        post: Callable[..., MPI.Request],
        *arguments: Any,
        status: Status = None,
    ) -> None:
        def steps(call: PointCall) -> Steps[None]:
            call.moves(*arguments)
            waiting = complete(self._world.held_requests, call, post, *arguments, status=status)
            try:
                for awaited in waiting:
                    call.posted = True
                    yield awaited
            except MPI.Exception:
                call.posted = False  # MPI has ended it: no transfer is under way
                raise

        self.point(op, peer, steps)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._post("Send", dest, post_send, self, buf, dest, tag)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._post("Ssend", dest, Raw.Issend, self, buf, dest, tag)

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._post("Rsend", dest, Raw.Irsend, self, buf, dest, tag)

    def Recv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Status = None
    ) -> None:
        self._post("Recv", source, Raw.Irecv, self, buf, source, tag, status=status)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: Status = None,
    ) -> None:
        def steps(call: PointCall) -> Steps[None]:
            call.moves(sendbuf, recvbuf)
            both: list[MPI.Request] = []
            self.keep(both)
            # The receive first: if its buffer is invalid, no data has been sent. With starmap no
            # interrupt can come between MPI's call and the list.
            both.extend(starmap(Raw.Irecv, ((self, recvbuf, source, recvtag),)))
            try:
                both.extend(starmap(post_send, ((self, sendbuf, dest, sendtag),)))
            except BaseException:
                both[0].Cancel()
                raise
            call.posted = True
            call.stage += 1
            while not both[0].Test(status):
                yield call
            call.peers = self.peers(dest)
            while not both[1].Test():
                yield call
            self.release(both)

        self.point("Sendrecv", source, steps)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: Status = None,
    ) -> None:
        post, op = Raw.Isendrecv_replace, "Sendrecv_replace"
        self._post(op, source, post, self, buf, dest, sendtag, source, recvtag, status=status)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._post("send", dest, post_send, self, [_pickled(obj, dest), MPI.BYTE], dest, tag)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._post("ssend", dest, Raw.Issend, self, [_pickled(obj, dest), MPI.BYTE], dest, tag)

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: Status = None,
    ) -> Any:
        """Receives a picklable object of any size; ``buf`` is not used."""
        if buf is not None:
            warnings.warn("the 'buf' argument is deprecated", stacklevel=2)
        return self._receive("recv", source, tag, status)

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: Status = None,
    ) -> Any:
        data = [_pickled(sendobj, dest), MPI.BYTE]
        posted = PointCall(self._used().agreement, Spec("comm.send"), "", ())
        sent = complete(self._world.held_requests, posted, post_send, self, data, dest, sendtag)
        # Posts the send; its end is awaited after the receive.
        next(sent, None)
        received = self._receive("sendrecv", source, recvtag, status)

        def steps(call: PointCall) -> Steps[None]:
            call.posted = True
            call.moves(data)
            for _ in sent:
                yield call

        self.point("sendrecv", dest, steps)
        return received

    def _receive(self, op: str, source: int, tag: int, status: Status) -> Any:
        def steps(call: PointCall) -> Steps[Any]:
            about = status if status is not None else MPI.Status()
            while (message := Raw.Improbe(self, source, tag, about)) is None:
                yield call
            data = bytearray(about.Get_count(MPI.BYTE))
            call.posted = True
            call.moves(data)
            yield from complete(self._world.held_requests, call, message.Irecv, [data, MPI.BYTE])
            return MPI.pickle.loads(data) if data else None

        return self.point(op, source, steps)


def _probing(name: str, look: Callable[..., Any]) -> Callable[..., Any]:
    """MPI's probe of that name, which polls."""

    @wraps(getattr(Raw, name))
    def probe(self: PointToPoint, source: int = MPI.ANY_SOURCE, *rest: Any, **named: Any) -> Any:
        def steps(call: PointCall) -> Steps[Any]:
            while not (found := look(self, source, *rest, **named)):
                yield call
            return found

        return self.point(name, source, steps)

    return probe


for _name, _look in {
    **dict.fromkeys(("Probe", "probe"), Raw.Iprobe),
    **{"Mprobe": Raw.Improbe, "mprobe": Raw.improbe},
}.items():
    setattr(PointToPoint, _name, _probing(_name, _look))


def _looking(name: str) -> Callable[..., Any]:
    """MPI's probe of that name, which does not wait; refused after the communicator's epoch."""
    plain = getattr(Raw, name)

    @wraps(plain)
    def look(self: PointToPoint, *arguments: Any, **options: Any) -> Any:
        self._group()
        return plain(self, *arguments, **options)

    return look


for _name in ("Iprobe", "iprobe", "Improbe", "improbe"):
    setattr(PointToPoint, _name, _looking(_name))


def _pickled(value: object, dest: int) -> bytes:
    return MPI.pickle.dumps(value) if dest != MPI.PROC_NULL else b""


class Waiting:
    """The methods of a request that wait: they poll, and can be interrupted."""

    comm: PointToPoint | None = None
    op = "request"
    peer = MPI.ANY_SOURCE
    every = False
    buffers: tuple[Any, ...] = ()


def _waiting(name: str) -> Callable[..., Any]:
    """MPI's wait of that name; all requests that it needs have completed before MPI is called."""
    plain = getattr(MPI.Request, name)
    one, any_will_do = name in ("Wait", "wait"), name.lower() in ("waitany", "waitsome")

    @wraps(plain)
    def wait(requests: Any, *arguments: Any, **options: Any) -> Any:
        _settle((requests,) if one else requests, name, one_will_do=any_will_do)
        found = plain(requests, *arguments, **options)
        raise_kept()
        return found

    return wait


def _completed(name: str, found: Any) -> bool:
    """Whether this result of MPI's test of that name means that a request has completed."""
    # Test and Testall return a flag, Testany (index, flag) and Testsome a list or None. The forms
    # for objects return the flag or the list first.
    if name.lower() == "testany":
        return bool(found[1])
    return bool(found if name.istitle() else found[0])


def _testing(name: str) -> Callable[..., Any]:
    """MPI's test of that name, which raises the exception of an op's function."""
    plain = getattr(MPI.Request, name)

    @wraps(plain)
    def test(*arguments: Any, **options: Any) -> Any:
        found = plain(*arguments, **options)
        # Not earlier: until then MPI calls the op's function, and a caller that has caught the
        # exception may free the op, which ends the process.
        if _completed(name, found):
            raise_kept()
        return found

    return test


for _verb, _guarding in (("Wait", _waiting), ("Test", _testing)):
    for _name in (_verb, _verb.lower()):
        setattr(Waiting, _name, _guarding(_name))
        for _many in (f"{_name}all", f"{_name}any", f"{_name}some"):
            setattr(Waiting, _many, staticmethod(_guarding(_many)))


class Request(Waiting, MPI.Request, metaclass=StandIn):
    """MPI.Request with the same methods."""

    plain = MPI.Request


class Prequest(Waiting, MPI.Prequest, metaclass=StandIn):
    """MPI.Prequest with the same methods."""

    plain = MPI.Prequest


def _pending(requests: Sequence[MPI.Request]) -> list[MPI.Request]:
    return [request for request in requests if not request.Get_status()]


def _settle(requests: Sequence[MPI.Request], name: str, *, one_will_do: bool = False) -> None:
    """Ends when MPI's own wait would not block: all requests have completed, or one has."""
    pending = _pending(requests)
    ours: list[Any] = [one for one in pending if getattr(one, "comm", None) is not None]
    # MPI waits for requests of communicators that are not guarded.
    if not ours or (one_will_do and len(pending) < len(requests)):
        return
    first, comm = ours[0], ours[0].comm

    def steps(call: PointCall) -> Steps[None]:
        left = pending
        call.posted = True
        call.every = first.every and not one_will_do
        call.moves(*(buffer for one in ours for buffer in getattr(one, "buffers", ())))
        if one_will_do:
            call.peers = tuple(sorted({rank for one in ours for rank in one.comm.peers(one.peer)}))
        # If this wait is left, MPI may still write to the buffers.
        comm.keep(pending)
        while left and (not one_will_do or len(left) == len(pending)):
            yield call
            left = _pending(left)
            following: Any = left[0] if left and not one_will_do else first
            if following is not first and getattr(following, "comm", None) is not None:
                call.peers, call.every = following.comm.peers(following.peer), following.every
        comm.release(pending)

    title = first.op if len(requests) == 1 else f"{first.op}, {name}"
    comm.point(title, first.peer, steps)


_ONE_PEER = {
    **dict.fromkeys(("Isend", "Issend", "Irsend", "isend", "issend"), ("dest", 1)),
    **dict.fromkeys(("Irecv", "irecv", "Recv_init"), ("source", 1)),
    **dict.fromkeys(("Send_init", "Ssend_init", "Rsend_init"), ("dest", 1)),
    "Psend_init": ("dest", 2),
    "Precv_init": ("source", 2),
    "Isendrecv": ("source", 4),
    "Isendrecv_replace": ("source", 3),
}
"""Calls of two ranks: the name of the argument for the peer, and its position."""
_ALL_PEERS = tuple(
    f"I{name.lower()}" if form == "I" else f"{name}_init"
    for form in ("I", "init")
    for name in ("Barrier", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather",
                 "Allgatherv", "Alltoall", "Alltoallv", "Alltoallw", "Reduce", "Allreduce",
                 "Reduce_scatter_block", "Reduce_scatter", "Scan", "Exscan")
)  # fmt: skip


def _returning(name: str, peer: tuple[str, int] | None) -> Callable[..., Request | Prequest]:
    plain = getattr(Raw, name)

    @wraps(plain)
    def post(self: PointToPoint, *arguments: Any, **options: Any) -> Request | Prequest:
        if peer is None:
            made = self._made_by_all(name, plain, *arguments, **options)
        else:
            self._used()
            made = plain(self, *arguments, **options)
        request = (Prequest if isinstance(made, MPI.Prequest) else Request)(made)
        request.comm, request.op, request.every = self, name, peer is None
        request.buffers = arguments
        if peer is not None:
            word, place = peer
            given = arguments[place] if len(arguments) > place else MPI.ANY_SOURCE
            request.peer = options.get(word, given)
        return request

    return post


for _name in (*_ONE_PEER, *_ALL_PEERS):
    setattr(PointToPoint, _name, _returning(_name, _ONE_PEER.get(_name)))
