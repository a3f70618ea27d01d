"""Sends and receives of `comm`, and its requests and operations, whose waits can be interrupted.

MPI.Request, MPI.Prequest and MPI.Op have stand-ins here. A function of an MPI.Op may raise:
mpi4py would end the process, and MPI the other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from ctypes import memmove
from functools import partial, wraps
from inspect import Signature, signature
from itertools import starmap
from mmap import mmap
from typing import Any, Self, TypeVar, cast

import numpy as np
from mpi4py import MPI

from allranks.collectives.calls.call import ARRAY_TAGS, PointCall, Steps
from allranks.collectives.calls.deadlocks import OtherTag
from allranks.collectives.calls.posts import Posts
from allranks.collectives.calls.specs import Spec
from allranks.collectives.mpi.transport import complete, release_dropped, reports_death
from allranks.collectives.ops.bounds import APART, behind_end, mistake, overlap
from allranks.collectives.ops.buffers import (
    IN_PLACE_ON_ALL,
    is_in_fortrans_order,
    is_masked,
    is_plain,
    layout_of,
    nbytes_of_message,
    with_copy,
    with_in_place,
    with_wrapping_sum,
)
from allranks.collectives.ops.reserved import WRITES_BEHIND, drop_rest, extended, reserve
from allranks.collectives.world import World
from allranks.collectives.world.world import Group
from allranks.errors import StaleHandle, UsageError


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


_LOOKS = 2
"""How many dropped requests each call looks at: more than one, so that they become fewer."""
_OBJECT_NBYTES = 32 << 20
"""A message of irecv is mostly shorter."""
_AT_ONCE_NBYTES = 1024
"""A message of this length has come as a whole when a probe finds it: MPI does not wait for it."""


class RefusedByMpi(UsageError, MPI.Exception):
    """A mistake for which MPI has a ``code``; also the exception that mpi4py raises."""

    code: int

    def __new__(cls, message: str) -> Self:  # MPI keeps its code there
        return MPI.Exception.__new__(cls, cls.code)

    def __init__(self, message: str) -> None:
        super().__init__(self.code)
        self.message = message

    def __str__(self) -> str:
        return self.message


class OutsideOfBuffers(RefusedByMpi):
    """A call that would leave its buffers."""

    code = MPI.ERR_BUFFER


class MessageTooLong(RefusedByMpi):
    """A message that is longer than the buffer that receives it."""

    code = MPI.ERR_TRUNCATE


_NOTHING_WRITTEN = "Nothing was written to it; the message is dropped."
_WRITTEN_UP_TO_ITS_END = "The buffer is full, and the rest of the message is dropped."


def _check_within(op: str, buffer: Any, peer: Any = None) -> None:
    # Without a peer, mpi4py does not look at the buffer.
    if peer != MPI.PROC_NULL and (wrong := behind_end(buffer)):
        raise OutsideOfBuffers(f"comm.{op} needs {wrong}.")


def _check_apart(op: str, sendbuf: Any, recvbuf: Any) -> None:
    if overlap(sendbuf, recvbuf):
        raise OutsideOfBuffers(
            f"comm.{op} needs {APART}. Pass a copy, x.copy(), or call comm.{op}_replace."
        )


def _too_long(
    op: str, about: MPI.Status, room: int, outcome: str = _NOTHING_WRITTEN
) -> MessageTooLong:
    return MessageTooLong(
        f"{op} needs a buffer for the whole message: rank {about.Get_source()} has sent "
        f"{about.Get_count(MPI.BYTE):,} bytes (tag {about.Get_tag()}), and the buffer has "
        f"{room:,}. {outcome} Pass a buffer of the length and type that is sent."
    )


_ORDER_HINT = (
    "comm.{} moves memory as it lies, and this array is in Fortran's order, as a transposed one: a "
    "receiver's array in C order gets its values in other places. Pass np.ascontiguousarray(x), or "
    "receive into an array that is made with order='F'."
)
_MASK_HINT = (
    "comm.{} moves all values of an array, also those that its mask hides, and the receivers get "
    "no mask. Pass x.filled(0){}."
)
_MASKED_OBJECT = ", or send x as an object: comm.{}(x)"


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
        if dropped := self._world.dropped_requests:
            release_dropped(dropped, _LOOKS)
        return self._group()

    # An option of mpi4py's may have any name, as op.
    def _made_by_all(
        self, op: str, post: Callable[..., T], /, *arguments: Any, **options: Any
    ) -> T:
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
            return (ranks[int(peer)],)  # mpi4py takes a float, as that of size / 2
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
        self._look_at("Send", buf, dest)
        self._post("Send", dest, post_send, self, buf, dest, tag)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._look_at("Ssend", buf, dest)
        self._post("Ssend", dest, Raw.Issend, self, buf, dest, tag)

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._look_at("Rsend", buf, dest)
        self._post("Rsend", dest, Raw.Irsend, self, buf, dest, tag)

    def _look_at(self, op: str, buf: Any, dest: int) -> None:
        """Raises if a message leaves its buffer. Hints at what the receiver cannot compare: a
        message does not have the order of its values.
        """
        _check_within(op, buf, dest)
        if is_in_fortrans_order(buf):
            self._world.hint(_ORDER_HINT.format(op))
        self._hint_at_mask(op, buf)

    def _hint_at_mask(self, op: str, buf: Any) -> None:
        if type(buf) is not np.ndarray and is_masked(buf):
            # Calls with counts, and others, have no form for objects.
            other = _MASKED_OBJECT.format(op.lower()) if hasattr(self, op.lower()) else ""
            self._world.hint(_MASK_HINT.format(op, other))

    def Recv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Status = None
    ) -> None:
        room = self.room(buf, source)
        if room is None:
            self._post("Recv", source, Raw.Irecv, self, buf, source, tag, status=status)
            return

        def steps(call: PointCall) -> Steps[None]:
            yield from self._matched(call, buf, room, source, tag, status)

        self.point("Recv", source, steps)

    def room(self, buf: Any, source: int = MPI.ANY_SOURCE, op: str = "Recv") -> int | None:
        """The bytes of a receiver's buffer; None if unknown. Raises if mpi4py refuses it."""
        if source == MPI.PROC_NULL:
            return None
        if is_plain(buf):
            return int(buf.nbytes)
        Raw.Recv_init(self, buf, 0).Free()  # never started
        _check_within(op, buf)
        return nbytes_of_message(buf)

    def _matched(
        self, call: PointCall, buf: Any, room: int | None, source: int, tag: int, status: Status
    ) -> Steps[None]:
        """Receives a message once it has come, and its length has been compared with the buffer's.

        Open MPI would write the whole message to a shorter buffer, and behind it, before it raises.
        """
        call.moves(buf)
        kept = self._world.held_requests
        if room is None:
            call.posted = True
            yield from complete(kept, call, Raw.Irecv, self, buf, source, tag, status=status)
            return
        about = status if status is not None else MPI.Status()
        message = Raw.Improbe(self, source, tag, about)
        if message is None:
            message = yield from self.awaited(call, source, tag, about)
        found, into = about.Get_count(MPI.BYTE), buf
        if found <= min(room, _AT_ONCE_NBYTES):
            message.Recv(buf)
            return
        if found > room:
            into = [bytearray(found), MPI.BYTE]  # the sender may wait for the end of its message
        call.posted = True
        yield from complete(kept, call, message.Irecv, into)
        if into is not buf:
            call.posted = False
            raise _too_long(f"comm.{call.name}", about, room)

    def awaited(
        self, call: PointCall, source: int, tag: int, about: MPI.Status, added: int = 0
    ) -> Steps[MPI.Message]:
        """The message, once it has come. ``added``: what is added to the tags."""
        call.other_tag = self.looking_for_other_tags(source, tag, added)
        while (message := Raw.Improbe(self, source, tag + added, about)) is None:
            yield call
        call.other_tag = None
        return message

    def looking_for_other_tags(
        self, source: int, tag: int, added: int = 0
    ) -> Callable[[], OtherTag | None] | None:
        """A function that looks for a message which this receive does not take; None if it takes
        any. ``added``: what is added to the tags.
        """
        return partial(self._other_tag, source, int(tag), added) if tag != MPI.ANY_TAG else None

    def _other_tag(self, source: int, tag: int, added: int) -> OtherTag | None:
        about = MPI.Status()
        if not Raw.Iprobe(self, source, MPI.ANY_TAG, about):
            return None
        sent = about.Get_tag() - added
        # A message of `send` is not for a receive of `comm`, nor the reverse.
        is_other_kind = (about.Get_tag() < ARRAY_TAGS) != (tag + added < ARRAY_TAGS)
        if sent == tag or is_other_kind:
            return None
        sender = self._group().ranks[about.Get_source()]
        return OtherTag(self._world.rank, sender, sent, tag)

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
        self._send_and_receive("Sendrecv", sendbuf, dest, sendtag, recvbuf, source, recvtag, status)

    def _send_and_receive(
        self,
        op: str,
        sendbuf: Any,
        dest: int,
        sendtag: int,
        recvbuf: Any,
        source: int,
        recvtag: int,
        status: Status,
    ) -> None:
        room = self.room(recvbuf, source, op)  # first: if it is invalid, no data is sent
        if MPI.PROC_NULL not in (dest, source):
            _check_apart(op, sendbuf, recvbuf)
        if is_in_fortrans_order(recvbuf):
            _check_within(op, sendbuf, dest)
        else:
            self._look_at(op, sendbuf, dest)

        def steps(call: PointCall) -> Steps[None]:
            sent: list[MPI.Request] = []
            self.keep(sent)
            # With starmap no interrupt can come between MPI's call and the list.
            sent.extend(starmap(post_send, ((self, sendbuf, dest, sendtag),)))
            call.posted = True
            call.stage += 1
            late: MessageTooLong | None = None
            try:
                yield from self._matched(call, recvbuf, room, source, recvtag, status)
            except MessageTooLong as error:
                late = error
            call.posted = True
            call.moves(sendbuf, recvbuf)
            call.peers = self.peers(dest)
            while not sent[0].Test():
                yield call
            self.release(sent)
            if late is not None:
                call.posted = False
                raise late

        self.point(op, source, steps)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: Status = None,
    ) -> None:
        op, rest = "Sendrecv_replace", (source, recvtag, status)
        copy = _copied(op, buf, dest, source)
        if copy is not None:  # Open MPI does not report a message that is too long
            self._send_and_receive(op, copy, dest, sendtag, buf, *rest)
        else:
            post = Raw.Isendrecv_replace
            self._post(op, source, post, self, buf, dest, sendtag, source, recvtag, status=status)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._post("send", dest, post_send, self, [_pickled(obj, dest), MPI.BYTE], dest, tag)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._post("ssend", dest, Raw.Issend, self, [_pickled(obj, dest), MPI.BYTE], dest, tag)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> MPI.Request:
        """MPI_Isend of a picklable object."""
        # With its length: else a wait for a long one would soon look like a deadlock.
        sent: MPI.Request = _plainly["isend"](self, [_pickled(obj, dest), MPI.BYTE], dest, tag)
        return sent

    def issend(self, obj: Any, dest: int, tag: int = 0) -> MPI.Request:
        """MPI_Issend of a picklable object."""
        sent: MPI.Request = _plainly["issend"](self, [_pickled(obj, dest), MPI.BYTE], dest, tag)
        return sent

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

        def rest(call: PointCall) -> Steps[None]:
            # The same call: now it waits for another rank, which may not have left.
            call.peers, call.left_at = self.peers(dest), -1.0
            call.moves(*call.buffers, data)
            for _ in sent:
                yield call

        return self._receive("sendrecv", source, recvtag, status, rest)

    def Isendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
    ) -> MPI.Request:
        """MPI_Isendrecv_replace."""
        op = "Isendrecv_replace"
        copy = _copied(op, buf, dest, source)
        if copy is not None:  # MPICH sends other bytes of a type with gaps
            received: MPI.Request = self.Isendrecv(
                copy, dest, sendtag, buf, source=source, recvtag=recvtag
            )
            cast("Request", received).op = op
            return received
        plain: MPI.Request = _plainly[op](self, buf, dest, sendtag, source, recvtag)
        return plain

    def irecv(
        self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> MPI.Request:
        """MPI_Irecv of a picklable object of up to 2 GB; ``buf`` is not used.

        Where the memory of a process is limited, as by ``ulimit -v``, of up to 32 MB.
        """
        # mpi4py takes 32 KB, behind which Open MPI writes what is longer.
        received: MPI.Request = _plainly["irecv"](self, reserve(), source, tag)
        return received

    def _receive(
        self,
        op: str,
        source: int,
        tag: int,
        status: Status,
        rest: Callable[[PointCall], Steps[None]] | None = None,
    ) -> Any:
        def steps(call: PointCall) -> Steps[Any]:
            about = status if status is not None else MPI.Status()
            message = Raw.Improbe(self, source, tag, about)
            if message is None:
                message = yield from self.awaited(call, source, tag, about)
            data = bytearray(about.Get_count(MPI.BYTE))
            call.posted = True
            call.moves(data)
            yield from complete(self._world.held_requests, call, message.Irecv, [data, MPI.BYTE])
            if rest is not None:
                yield from rest(call)
            return MPI.pickle.loads(data) if data else None

        return self.point(op, source, steps)


class Message(MPI.Message):
    """MPI.Message, which knows the length of the message that a probe has found."""

    about: MPI.Status
    comm: PointToPoint
    epoch: int
    op = "Mprobe"

    def Recv(self, buf: Any, status: Status = None) -> None:
        """MPI_Mrecv; raises `MessageTooLong` for a buffer that is too short."""
        _refuse_stale((self,))
        self._compare("Recv", buf)
        super().Recv(buf, status)

    def Irecv(self, buf: Any) -> MPI.Request:
        """MPI_Imrecv; raises as `Recv`."""
        _refuse_stale((self,))
        self._compare("Irecv", buf)
        request = Request(super().Irecv(buf))
        request.comm, request.op, request.epoch = self.comm, "Irecv", self.epoch
        request.peer, request.buffers = self.about.Get_source(), (buf,)
        return request

    def _compare(self, op: str, buf: Any) -> None:
        found, room = self.about.Get_count(MPI.BYTE), self.comm.room(buf)
        if room is not None and found > room:
            super().Recv([bytearray(found), MPI.BYTE])  # the sender may wait for its end
            raise _too_long(f"Message.{op}", self.about, room)


def _matching(
    self: PointToPoint,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    status: Status = None,
) -> Message | None:
    """MPI_Improbe."""
    given = status if status is not None else MPI.Status()
    plain = Raw.Improbe(self, source, tag, given)
    if plain is None:
        return None
    found = Message(plain)
    found.comm, found.about, found.epoch = self, MPI.Status(given), self._world.epoch
    return found


def _probing(name: str, look: Callable[..., Any]) -> Callable[..., Any]:
    """MPI's probe of that name, which polls."""

    @wraps(getattr(Raw, name))
    def probe(self: PointToPoint, source: int = MPI.ANY_SOURCE, *rest: Any, **named: Any) -> Any:
        def steps(call: PointCall) -> Steps[Any]:
            tag = _argument(("tag", 0), rest, named, MPI.ANY_TAG)
            call.other_tag = self.looking_for_other_tags(source, tag)
            while not (found := look(self, source, *rest, **named)):
                yield call
            return found

        return self.point(name, source, steps)

    return probe


for _name, _look in {
    **dict.fromkeys(("Probe", "probe"), Raw.Iprobe),
    **{"Mprobe": _matching, "mprobe": Raw.improbe},
}.items():
    setattr(PointToPoint, _name, _probing(_name, _look))


def _looking(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """MPI's probe of that name, which does not wait; refused after the communicator's epoch."""

    @wraps(getattr(Raw, name))
    def look(self: PointToPoint, *arguments: Any, **options: Any) -> Any:
        self._group()
        return plain(self, *arguments, **options)

    return look


for _name in ("Iprobe", "iprobe", "Improbe", "improbe"):
    _look = _matching if _name == "Improbe" else getattr(Raw, _name)
    setattr(PointToPoint, _name, _looking(_name, _look))


def _copied(op: str, buf: Any, dest: int, source: int) -> Any:
    """The same bytes, in the same form of mpi4py; None for others than arrays."""
    if dest == source == MPI.PROC_NULL:
        return None
    _check_within(op, buf)  # first: else what is behind the array would be copied
    data, *form = buf if isinstance(buf, list | tuple) else (buf,)
    if type(data) is not np.ndarray:
        return None
    end = 0 if is_plain(buf) else _end_of(buf)
    # As it lies in memory: mpi4py sends an array in Fortran's order as it is. An array may also
    # only say where a column begins.
    here = MPI.memory.fromaddress(MPI.Get_address(data), end) if end > data.nbytes else None
    copy = data.copy(order="K") if here is None else here.tobytes()
    return [copy, *form] if form else copy


def _end_of(buf: Any) -> int:
    """The bytes from the begin of a buffer's data to the end of its message."""
    if (layout := layout_of(buf)) is None:
        return 0
    _, start, count, kind = layout
    if not count:
        return 0
    return start + (count - 1) * kind.extent + kind.true_lb + kind.true_extent


def _pickled(value: object, dest: int) -> bytes:
    return MPI.pickle.dumps(value) if dest != MPI.PROC_NULL else b""


_NO_REQUEST = MPI.REQUEST_NULL


class Copied:
    """An operation of MPI that several requests stand for: ``MPI.Request(request)`` makes a copy.

    It outlives all of them. Only one of them can end the operation: MPI then forgets it, and may
    give its handle, which the others still have, to another operation.
    """

    ended = False
    """Whether one of the requests has ended the operation before it was dropped."""

    def __init__(self, comm: PointToPoint, request: MPI.Request) -> None:
        self._comm, self._request = comm, request

    def __del__(self) -> None:
        if not self.ended:
            self._comm._world.dropped_requests.append(self._request)


class Waiting:
    """The methods of a request that wait: they poll, and can be interrupted.

    A program may drop it before it has ended: mpi4py would then free memory that MPI uses.
    """

    plain: type[MPI.Request]
    comm: PointToPoint | None = None
    copied: Copied | None = None
    epoch = 0
    """In which it was made."""
    op = "request"
    peer = MPI.ANY_SOURCE
    tag = MPI.ANY_TAG
    """Of a receive."""
    every = False
    """Whether all ranks of its communicator make their part of it."""
    posts: Posts | None = None
    """Of a request of a collective: who has made its part."""
    number = 0
    """Which of the posts it is."""
    buffers: tuple[Any, ...] = ()
    room: int | None = None
    """The bytes of a receiver's buffer that continues in reserved memory."""
    seen: MPI.Status | MPI.Exception | None = None
    """The end of a persistent request, as a look at it has found it."""

    def __new__(cls, request: Any = None) -> Self:
        made = super().__new__(cls, request)  # type: ignore[call-arg]
        if isinstance(request, Waiting) and request.comm is not None:
            if request.copied is None:
                request.copied = Copied(request.comm, request.plain(cast("Request", request)))
            vars(made).update(vars(request))
        return made

    def has_ended(self) -> bool:
        """Whether MPI does not use its buffers any more, as far as can be known."""
        try:
            return _has_ended(cast("Request", self))
        except MPI.Exception:  # a rank has died
            return True

    def __del__(self) -> None:
        # MPI may still use the buffers. A garbage collection may run in any thread, and in the
        # middle of a call: so `release_dropped` asks MPI, later.
        if self.comm is None:
            return
        if self.copied is None:
            if self != _NO_REQUEST:
                self.comm._world.dropped_requests.append(self)
        elif self == _NO_REQUEST:
            self.copied.ended = True


def _ended(name: str, plain: Callable[..., Any], requests: Any, *rest: Any, **named: Any) -> Any:
    """Calls MPI's wait or test of that name. Raises `MessageTooLong` for what it has received."""
    form = name.lower()[4:]
    these: Sequence[Any] = requests if form else (requests,)
    if all(getattr(one, "room", None) is None and not _seen(one) for one in these):
        return plain(requests, *rest, **named)
    many = form in ("all", "some")
    about = rest[0] if rest else named.pop("statuses" if many else "status", None)
    if about is None:
        about = [] if many else MPI.Status()
    found = plain(requests, about, **named)
    for request, status in _received(name, found, these, about):
        if (seen := _seen(request)) is not None:
            request.seen = None
            if isinstance(seen, MPI.Exception):
                raise seen
            _copy_status(seen, status)
        room = getattr(request, "room", None)
        if room is None or status.Is_cancelled() or status.Get_count(MPI.BYTE) <= room:
            continue
        drop_rest()
        raise _too_long(f"comm.{request.op}", status, room, _WRITTEN_UP_TO_ITS_END)
    return found


def _seen(request: Any) -> MPI.Status | MPI.Exception | None:
    return getattr(request, "seen", None)


def _copy_status(found: MPI.Status, into: MPI.Status) -> None:
    into.Set_source(found.Get_source())
    into.Set_tag(found.Get_tag())
    into.Set_elements(MPI.BYTE, found.Get_elements(MPI.BYTE))


def _received(
    name: str, found: Any, requests: Sequence[Any], about: Any
) -> Iterable[tuple[Any, MPI.Status]]:
    """The requests that MPI's wait or test has ended with this result, and their statuses."""
    form, tests = name.lower()[4:], name.lower().startswith("test")
    if tests and not _completed(name, found):
        return ()
    if form in ("", "all"):
        return zip(requests, about if form else (about,), strict=False)
    # Waitany returns an index and Waitsome a list; other forms return them first.
    first = found[0] if isinstance(found, tuple) else found
    places = ([first] if first >= 0 else []) if form == "any" else first or []
    return zip([requests[at] for at in places], about if form == "some" else (about,), strict=False)


def _refuse_stale(requests: Sequence[Any]) -> None:
    """Raises `StaleHandle` for a request of an epoch that has ended: it may have received a message
    of a cell that failed.
    """
    for one in requests:
        comm: PointToPoint | None = getattr(one, "comm", None)
        if comm is not None and one.epoch != comm._world.epoch and one != MPI.REQUEST_NULL:
            raise StaleHandle(
                f"a request lasts until an error or an interrupt ends its epoch: this one, of "
                f"comm.{one.op}, is of epoch {one.epoch}, and it is {comm._world.epoch} now. Make "
                "it again, as in the cell that made it."
            )


def _waiting(name: str) -> Callable[..., Any]:
    """MPI's wait of that name; all requests that it needs have completed before MPI is called."""
    plain = getattr(MPI.Request, name)
    one, any_will_do = name in ("Wait", "wait"), name.lower() in ("waitany", "waitsome")

    @wraps(plain)
    def wait(requests: Any, *arguments: Any, **options: Any) -> Any:
        _refuse_stale((requests,) if one else requests)
        _settle((requests,) if one else requests, name, one_will_do=any_will_do)
        found = _ended(name, plain, requests, *arguments, **options)
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
    one = name in ("Test", "test")

    @wraps(plain)
    def test(requests: Any, *arguments: Any, **options: Any) -> Any:
        _refuse_stale((requests,) if one else requests)
        found = _ended(name, plain, requests, *arguments, **options)
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

    def Free(self) -> None:
        """MPI_Request_free. MPI ends a message that is under way, and its buffer is kept until
        then; a collective cannot be freed.
        """
        # mpi4py.futures calls ``MPI.Request.Free`` with requests of mpi4py's own class.
        comm = getattr(self, "comm", None)
        if comm is None or self.every or self == _NO_REQUEST or self.Get_status():
            Request.plain.Free(self)
            return
        comm._world.dropped_requests.append(self.plain(self))
        memmove(MPI._addressof(self), MPI._addressof(_NO_REQUEST), MPI._sizeof(self))

    def free(self) -> None:
        """Frees a request that is not the null request."""
        if self != _NO_REQUEST:
            Request.Free(self)


class Prequest(Waiting, MPI.Prequest, metaclass=StandIn):
    """MPI.Prequest with the same methods."""

    plain = MPI.Prequest

    def Start(self) -> None:
        """MPI_Start."""
        _refuse_stale((self,))
        _add_posts((self,))
        super().Start()

    @staticmethod
    def Startall(requests: list[MPI.Prequest]) -> None:
        """MPI_Startall."""
        _refuse_stale(requests)
        _add_posts(requests)
        Prequest.plain.Startall(requests)  # the name in mpi4py is replaced by this class


def _add_posts(requests: Sequence[Any]) -> None:
    # Before they start: a rank that has received another's data finds its post, too.
    for one in requests:
        if type(one) is Prequest:
            one.seen = None  # of its start before
        if (posts := getattr(one, "posts", None)) is not None:
            one.number = posts.add(one)


def _pending(requests: Sequence[MPI.Request]) -> list[MPI.Request]:
    return [request for request in requests if not _has_ended(request)]


def _has_ended(request: MPI.Request) -> bool:
    # MPICH raises the error of a transfer here, and again in MPI's own wait; but it forgets the end
    # of a persistent request at the first look.
    ours = request if type(request) is Prequest else None
    if ours is not None and ours.seen is not None:
        return True
    about = MPI.Status() if ours is not None else None
    try:
        ended = request.Get_status(about)
    except MPI.Exception as error:
        if reports_death(error):
            raise
        if ours is not None:
            ours.seen = error
        return True
    if ended and ours is not None and not WRITES_BEHIND:
        ours.seen = about
    return ended


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
        if call.every:
            call.posts, call.request = first.posts, first.number
        buffers = [buffer for one in ours for buffer in getattr(one, "buffers", ())]
        # The reserved memory of irecv is not the length of its message.
        known = [buffer for buffer in buffers if type(buffer) is not mmap]
        call.moves(*known)
        call.unknown_nbytes = _OBJECT_NBYTES if len(known) < len(buffers) else 0
        if one_will_do:
            call.peers = tuple(sorted({rank for one in ours for rank in one.comm.peers(one.peer)}))
        else:
            call.other_tag = comm.looking_for_other_tags(first.peer, first.tag)
        # If this wait is left, MPI may still write to the buffers.
        comm.keep(pending)
        while left and (not one_will_do or len(left) == len(pending)):
            yield call
            left = _pending(left)
            following: Any = left[0] if left and not one_will_do else first
            if following is not first and getattr(following, "comm", None) is not None:
                there, peer = following.comm, following.peer
                call.peers, call.every = there.peers(peer), following.every
                call.posts, call.request = following.posts, following.number
                call.other_tag = there.looking_for_other_tags(peer, following.tag)
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
_COLLECTIVES = (
    *("Barrier", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv"),
    *("Alltoall", "Alltoallv", "Alltoallw", "Reduce", "Allreduce", "Reduce_scatter_block"),
    *("Reduce_scatter", "Scan", "Exscan"),
)
PREPARING = tuple(f"{name}_init" for name in _COLLECTIVES)
"""Calls that make a persistent request for a collective."""
_ALL_PEERS = (*(f"I{name.lower()}" for name in _COLLECTIVES), *PREPARING)


_INTO = {"Irecv": ("buf", 0), "Recv_init": ("buf", 0), "Isendrecv": ("recvbuf", 3)}
"""Calls that receive a message which may be longer than its buffer: the name of the argument for
the buffer, and its position."""


_OF_BYTES = {"isend": "Isend", "issend": "Issend"}
"""Calls for an object that are made with its bytes."""
_OF_BUFFERS = {
    **dict.fromkeys(("Isend", "Issend", "Irsend"), ((("buf", 0), ("dest", 1)),)),
    **dict.fromkeys(("Send_init", "Ssend_init", "Rsend_init"), ((("buf", 0), ("dest", 1)),)),
    **dict.fromkeys(("Irecv", "Recv_init"), ((("buf", 0), ("source", 1)),)),
    "Isendrecv": ((("sendbuf", 0), ("dest", 1)), (("recvbuf", 3), ("source", 4))),
}
"""Calls of two ranks with buffers: the names of the arguments for each of these and for its peer,
and their positions."""


_WITH_BUFFERS = {f"I{name.lower()}": name for name in _COLLECTIVES if name != "Barrier"}


def _within_buffers(
    call: str,
    plain: Callable[..., T],
    parameters: Signature,
    self: PointToPoint,
    *rest: Any,
    **named: Any,
) -> T:
    """MPI's collective that does not wait."""
    given = parameters.bind(self, *rest, **named)
    given.apply_defaults()
    values, me = given.args[1:], self.Get_rank()
    if given.arguments.get("root") in (None, me):
        # Nothing compares these calls: with IN_PLACE on some ranks only, sums are wrong.
        if call not in IN_PLACE_ON_ALL:
            values = with_in_place(call, values, root=True)
        wrong = mistake(call, values, me, self.Get_size())
    else:
        wrong = behind_end(values[call.startswith("Scatter")])
    if wrong:
        raise OutsideOfBuffers(f"comm.I{call.lower()} needs {wrong}.")
    return plain(self, *with_copy(call, with_wrapping_sum(call, values)))


def returning(
    name: str, peer: tuple[str, int] | None, plain: Callable[..., Any]
) -> Callable[..., Request | Prequest]:
    """Guards the call of that name, which does not wait. ``peer``: the argument for the peer; None
    if all ranks make the call.
    """
    call = _WITH_BUFFERS.get(name)
    make = partial(_within_buffers, call, plain, signature(plain)) if call else plain
    receives = name in ("Irecv", "irecv")

    @wraps(plain)
    def post(self: PointToPoint, *arguments: Any, **options: Any) -> Request | Prequest:
        room = None
        if peer is None:
            made = self._made_by_all(name, make, *arguments, **options)
        else:
            self._used()
            made, room = _posted(name, plain, self, arguments, options)
        kind: Any = Prequest if isinstance(made, MPI.Prequest) else Request
        # Not by `Waiting.__new__`, which looks for copies, and takes longer.
        request: Request | Prequest = kind.plain.__new__(kind, made)
        request.comm, request.op, request.every = self, name, peer is None
        request.epoch = self._world.epoch
        request.buffers, request.room = arguments, room
        if peer is None:
            posts = self._group().posts
            request.posts = posts.persistent() if kind is Prequest else posts
            if kind is Request:
                _add_posts((request,))
        else:
            request.peer = _argument(peer, arguments, options, MPI.ANY_SOURCE)
        if receives:
            request.tag = _argument(("tag", 2), arguments, options, MPI.ANY_TAG)
        return request

    return post


def _argument(
    which: tuple[str, int], rest: tuple[Any, ...], named: dict[str, Any], missing: Any
) -> Any:
    word, place = which
    return named.get(word, rest[place] if len(rest) > place else missing)


def _posted(
    name: str,
    plain: Callable[..., T],
    self: PointToPoint,
    rest: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[T, int | None]:
    """MPI's call of two ranks, and the bytes of its buffer if that continues in reserved memory."""
    word, place = _INTO.get(name, ("", 0))
    if word and _argument(_ONE_PEER[name], rest, named, None) == MPI.PROC_NULL:
        word = ""
    buf = _argument((word, place), rest, named, None)
    if word and not is_plain(buf):
        Raw.Recv_init(self, buf, 0).Free()  # raises if mpi4py refuses it
    for each, to in _OF_BUFFERS.get(name, ()):
        _check_within(name, _argument(each, rest, named, None), _argument(to, rest, named, None))
    peers = (_argument((w, p), rest, named, None) for w, p in (("dest", 1), ("source", 4)))
    if name == "Isendrecv" and MPI.PROC_NULL not in peers:
        _check_apart(name, _argument(("sendbuf", 0), rest, named, None), buf)
    found = extended(buf) if word else None
    if found is None:
        return plain(self, *rest, **named), None
    longer, room = found
    if word in named:
        named = {**named, word: longer}
    else:
        rest = (*rest[:place], longer, *rest[place + 1 :])
    try:
        return plain(self, *rest, **named), room
    finally:
        longer[-1].Free()


_plainly: dict[str, Callable[..., Any]] = {}
"""The calls that methods above make."""
for _name in (*_ONE_PEER, *_ALL_PEERS):
    _made = returning(_name, _ONE_PEER.get(_name), getattr(Raw, _OF_BYTES.get(_name, _name)))
    if _name in vars(PointToPoint):
        _plainly[_name] = _made
    else:
        setattr(PointToPoint, _name, _made)
