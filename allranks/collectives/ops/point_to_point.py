"""Sends and receives between two ranks whose wait can be left."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Literal

from mpi4py import MPI

from allranks.collectives.calls.call import PointCall
from allranks.collectives.calls.callsite import here
from allranks.collectives.calls.guard import Spec
from allranks.collectives.calls.wait import Steps
from allranks.collectives.mpi.transport import complete
from allranks.collectives.world import World
from allranks.collectives.world.group import Group
from allranks.errors import StaleHandle


class PointToPoint(MPI.Intracomm):
    """The part of `Comm` that concerns two ranks."""

    _world: World
    _number: int
    _epoch: int | None = None

    def bind(self, world: World, number: int, epoch: int | None = None) -> None:
        """Says which group of which world this communicator stands for, and until when."""
        self._world, self._number, self._epoch = world, number, epoch

    def _group(self) -> Group:
        if self._epoch is not None and self._epoch != self._world.epoch:
            raise StaleHandle(
                "a communicator from Split() or Dup() lasts until an error or an interrupt ends "
                f"its epoch: this one is of epoch {self._epoch}, and it is {self._world.epoch} "
                "now. Call Split() or Dup() again."
            )
        return self._world.groups[self._number]

    def _point(self, op: str, peer: int, steps: Callable[[PointCall], Steps[Any]]) -> Any:
        group = self._group()
        others = tuple(rank for rank in group.ranks if rank != self._world.rank)
        peers = others if peer < 0 else (group.ranks[peer],)
        call = PointCall(group.agreement, Spec(f"comm.{op}"), here(), op, 0, peers)
        call.transport = "mpi"
        call.steps = steps(call)
        return self._world.run(call)

    def _post(
        self,
        op: str,
        peer: int,
        post: Callable[..., MPI.Request],
        *arguments: Any,
        status: MPI.Status | None = None,
    ) -> None:
        def steps(call: PointCall) -> Steps[None]:
            call.posted = True
            yield from complete(self._world.kept, call, post, *arguments, status=status)

        self._point(op, peer, steps)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """MPI_Send."""
        self._post("Send", dest, self.Isend, buf, dest, tag)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """MPI_Ssend."""
        self._post("Ssend", dest, self.Issend, buf, dest, tag)

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """MPI_Rsend."""
        self._post("Rsend", dest, self.Irsend, buf, dest, tag)

    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """MPI_Recv."""
        self._post("Recv", source, self.Irecv, buf, source, tag, status=status)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """MPI_Sendrecv."""
        sent = self._begin(self.Isend, sendbuf, dest, sendtag)
        self._post("Sendrecv", source, self.Irecv, recvbuf, source, recvtag, status=status)
        self._end("Sendrecv", dest, sent)

    def Probe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Literal[True]:
        """MPI_Probe."""

        def steps(call: PointCall) -> Steps[None]:
            while not self.Iprobe(source, tag, status):
                yield call

        self._point("Probe", source, steps)
        return True

    def Mprobe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> MPI.Message:
        """MPI_Mprobe."""

        def steps(call: PointCall) -> Steps[MPI.Message]:
            while (message := self.Improbe(source, tag, status)) is None:
                yield call
            return message

        found: MPI.Message = self._point("Mprobe", source, steps)
        return found

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends a picklable object."""
        self._post("send", dest, self.Isend, [_pickled(obj), MPI.BYTE], dest, tag)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends a picklable object; ends when the receiver has begun to receive it."""
        self._post("ssend", dest, self.Issend, [_pickled(obj), MPI.BYTE], dest, tag)

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Receives a picklable object."""
        return self._receive("recv", source, tag, status)

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Sends one picklable object and receives another."""
        sent = self._begin(self.Isend, [_pickled(sendobj), MPI.BYTE], dest, sendtag)
        received = self._receive("sendrecv", source, recvtag, status)
        self._end("sendrecv", dest, sent)
        return received

    def probe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Literal[True]:
        """Waits for a message without receiving it."""
        return self.Probe(source, tag, status)

    def _receive(self, op: str, source: int, tag: int, status: MPI.Status | None) -> Any:
        def steps(call: PointCall) -> Steps[Any]:
            about = status if status is not None else MPI.Status()
            while (message := self.Improbe(source, tag, about)) is None:
                yield call
            data = bytearray(about.Get_count(MPI.BYTE))
            call.posted = True
            yield from complete(self._world.kept, call, message.Irecv, [data, MPI.BYTE])
            return pickle.loads(data)

        return self._point(op, source, steps)

    def _begin(self, post: Callable[..., MPI.Request], *arguments: Any) -> Steps[MPI.Request]:
        """Posts now what `_end` waits for."""
        holder = PointCall(self._group().agreement, Spec("comm.send"), here(), "", 0, ())
        steps = complete(self._world.kept, holder, post, *arguments)
        next(steps, None)
        return steps

    def _end(self, op: str, dest: int, sent: Steps[MPI.Request]) -> None:
        def steps(call: PointCall) -> Steps[None]:
            call.posted = True
            for _ in sent:
                yield call

        self._point(op, dest, steps)


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
