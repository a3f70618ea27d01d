"""Sends and receives between two ranks whose wait can be left."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from itertools import starmap
from typing import Any, TypeVar

from mpi4py import MPI

from allranks.collectives.calls.call import PointCall
from allranks.collectives.calls.guard import Spec
from allranks.collectives.calls.wait import Steps
from allranks.collectives.mpi.transport import complete
from allranks.collectives.world import World
from allranks.collectives.world.group import Group
from allranks.errors import StaleHandle

T = TypeVar("T")
Status = MPI.Status | None
Raw = MPI.Intracomm
"""MPI's own calls: where they are posted, what a subclass has put in their place is passed by."""


class PointToPoint(Raw):
    """The part of `Comm` that concerns two ranks."""

    _world: World
    _number: int
    _epoch: int | None = None

    def bind(self, world: World, number: int, epoch: int | None = None) -> None:
        """Says which group of which world this communicator stands for, and until when."""
        self._world, self._number, self._epoch = world, number, epoch

    @property
    def stale(self) -> bool:
        """Whether its epoch is over; the communicators of all ranks and of one last for good."""
        return self._epoch is not None and self._epoch != self._world.epoch

    def _group(self) -> Group:
        """The group that it stands for.

        Raises:
            StaleHandle: its epoch is over.
            MPI.Exception: it is null, or has been freed.
        """
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

    def peers(self, peer: int) -> tuple[int, ...]:
        """The rank of the world that is meant; all others where it may be any, or is none."""
        return self._peers(self._group(), peer)

    def _peers(self, group: Group, peer: int) -> tuple[int, ...]:
        ranks = group.ranks
        if 0 <= peer < len(ranks):
            return (ranks[peer],)
        return tuple(rank for rank in ranks if rank != self._world.rank)

    def point(self, op: str, peer: int, steps: Callable[[PointCall], Steps[T]]) -> T:
        """Runs a call that waits for one rank, or for any, from the user's line."""
        group = self._group()
        peers = self._peers(group, peer)
        call = PointCall(group.agreement, Spec(f"comm.{op}"), op, peers)
        call.transport = "mpi"
        call.steps = steps(call)
        result: T = self._world.run(call)
        call.buffers = ()  # the journal keeps the call
        return result

    def keep(self, requests: list[MPI.Request]) -> None:
        """Keeps requests, and with them their buffers, for as long as MPI may write to them."""
        self._world.kept[id(requests)] = requests

    def release(self, requests: list[MPI.Request]) -> None:
        """They have completed."""
        del self._world.kept[id(requests)]

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
            waiting = complete(self._world.kept, call, post, *arguments, status=status)
            try:
                for awaited in waiting:
                    call.posted = True
                    yield awaited
            except MPI.Exception:
                call.posted = False  # MPI itself has ended it: nothing of it is under way
                raise

        self.point(op, peer, steps)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """MPI_Send."""
        self._post("Send", dest, Raw.Isend, self, buf, dest, tag)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """MPI_Ssend."""
        self._post("Ssend", dest, Raw.Issend, self, buf, dest, tag)

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """MPI_Rsend."""
        self._post("Rsend", dest, Raw.Irsend, self, buf, dest, tag)

    def Recv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Status = None
    ) -> None:
        """MPI_Recv."""
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
        """MPI_Sendrecv."""

        def steps(call: PointCall) -> Steps[None]:
            call.moves(sendbuf, recvbuf)
            both: list[MPI.Request] = []
            self.keep(both)
            # The receive first: where its buffer is none, nothing has been sent.
            both.extend(starmap(Raw.Irecv, ((self, recvbuf, source, recvtag),)))
            try:
                both.extend(starmap(Raw.Isend, ((self, sendbuf, dest, sendtag),)))
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
        """MPI_Sendrecv_replace."""
        post, op = Raw.Isendrecv_replace, "Sendrecv_replace"
        self._post(op, source, post, self, buf, dest, sendtag, source, recvtag, status=status)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends a picklable object."""
        self._post("send", dest, Raw.Isend, self, [_pickled(obj, dest), MPI.BYTE], dest, tag)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends a picklable object; ends when the receiver has begun to receive it."""
        self._post("ssend", dest, Raw.Issend, self, [_pickled(obj, dest), MPI.BYTE], dest, tag)

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: Status = None,
    ) -> Any:
        """Receives a picklable object, of any size: ``buf`` is not needed."""
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
        """Sends one picklable object and receives another."""
        data = [_pickled(sendobj, dest), MPI.BYTE]
        posted = PointCall(self._group().agreement, Spec("comm.send"), "", ())
        sent = complete(self._world.kept, posted, Raw.Isend, self, data, dest, sendtag)
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
            yield from complete(self._world.kept, call, message.Irecv, [data, MPI.BYTE])
            return MPI.pickle.loads(data) if data else None

        return self.point(op, source, steps)


def _probing(name: str, look: Callable[..., Any]) -> Callable[..., Any]:
    """MPI's probe of that name, which looks again and again."""

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


def _pickled(value: object, dest: int) -> bytes:
    return MPI.pickle.dumps(value) if dest != MPI.PROC_NULL else b""
