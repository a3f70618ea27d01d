"""Messages between simulated ranks as methods of a communicator: sends, receives and probes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from allranks.collectives.calls import sites
from allranks.collectives.world.world import Group
from allranks.features.simulate import buffers
from allranks.features.simulate.events import ANY, PostedReceive, SimulatedMessage
from allranks.features.simulate.requests import (
    MatchedMessage,
    NullReceive,
    ReceiveRequest,
    SendRequest,
    SimulatedRequest,
    block,
    describe,
    filling,
    loaded,
    running,
    running_world,
    time_by_network,
)


class Messaging:
    """The messages of a communicator, whose ranks are those of ``_group``."""

    if TYPE_CHECKING:

        def _group(self) -> Group: ...

    def _peers(self, peer: int) -> tuple[int, ...]:
        """A peer's rank in the world; all other ranks for ANY."""
        group = self._group()
        if peer != ANY:
            return (peer,)
        me = group.ranks[group.me]
        return tuple(rank for rank in group.ranks if rank != me)

    def _send(
        self, op: str, data: Any, nbytes: int, dest: int, tag: int, buffered: bool | None = None
    ) -> SimulatedRequest:
        world, group = running_world(), self._group()
        world.scheduler.computed()
        if dest == MPI.PROC_NULL:
            return SimulatedRequest()
        if not 0 <= dest < group.size:
            raise MPI.Exception(MPI.ERR_RANK)
        _check_tag(tag)
        message = world.scheduler.mail.send(
            group, group.ranks[dest], tag, data, nbytes, sites.find(sys._getframe(2)), f"comm.{op}",
            buffered=buffered,
        )  # fmt: skip
        return SendRequest(world, message)

    def _receive(
        self, op: str, deliver: Callable[[SimulatedMessage, MPI.Status], Any], source: int, tag: int
    ) -> SimulatedRequest:
        world, group = running_world(), self._group()
        world.scheduler.computed()
        if source == MPI.PROC_NULL:
            return NullReceive()
        if source != MPI.ANY_SOURCE and not 0 <= source < group.size:
            raise MPI.Exception(MPI.ERR_RANK)
        if tag != MPI.ANY_TAG:
            _check_tag(tag)
        receive = world.scheduler.mail.receive(
            group,
            ANY if source == MPI.ANY_SOURCE else group.ranks[source],
            ANY if tag == MPI.ANY_TAG else tag,
            sites.find(sys._getframe(2)),
            f"comm.{op}",
        )
        return ReceiveRequest(lambda: self._peers(receive.source), world, receive, deliver)

    def Recv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:  # fmt: skip
        """MPI_Recv."""
        self._receive("Recv", filling(buf), source, tag).Wait(status)

    def Irecv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> SimulatedRequest:
        """MPI_Irecv."""
        return self._receive("Irecv", filling(buf), source, tag)

    def recv(
        self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:  # fmt: skip
        """Receives a picklable object."""
        return self._receive("recv", loaded, source, tag).wait(status)

    def irecv(
        self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> SimulatedRequest:
        """Posts a receive of a picklable object."""
        return self._receive("irecv", loaded, source, tag)

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE, recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:  # fmt: skip
        """MPI_Sendrecv."""
        received = self._receive("Sendrecv", filling(recvbuf), source, recvtag)
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
        received = self._receive("sendrecv", loaded, source, recvtag).wait(status)
        sent.Wait()
        return received

    def _look(self, op: str, source: int, tag: int) -> SimulatedMessage | None:
        """The first message that a receive would take, if there is one now."""
        world, group = running_world(), self._group()
        scheduler = world.scheduler
        scheduler.computed()
        whom = ANY if source == MPI.ANY_SOURCE else group.ranks[source]
        wanted = PostedReceive(
            scheduler.task.rank, group, whom, ANY if tag == MPI.ANY_TAG else tag,
            scheduler.task.clock, sites.find(sys._getframe(2)), f"comm.{op}",
        )  # fmt: skip
        found: list[SimulatedMessage] = scheduler.mail.candidates(wanted)
        if not found:
            scheduler.poll()
            found = scheduler.mail.candidates(wanted)
        if not found or not scheduler.schedule.has_completed(scheduler.task.rank, op):
            return None
        return found[scheduler.schedule.choose_message(wanted, found) if len(found) > 1 else 0]

    def _probed(
        self, op: str, source: int, tag: int, status: MPI.Status | None
    ) -> SimulatedMessage:
        # Its wait is a receive that is taken back: then a deadlock is found.
        world, group = running_world(), self._group()
        scheduler = world.scheduler
        if (found := self._look(op, source, tag)) is None:
            waiting = self._receive(op, loaded, source, tag)
            assert isinstance(waiting, ReceiveRequest)
            receive = waiting._receive
            while receive.message is None:
                block(world, receive.title, group.number, waiting._peers(), receive.site)
            found = receive.message
            scheduler.mail.put_back(found)
        describe(status, group.ranks.index(found.source), found.tag, found.nbytes)
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
            describe(status, self._group().ranks.index(found.source), found.tag, found.nbytes)
        return found is not None

    iprobe = Iprobe

    def Mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> MatchedMessage:  # fmt: skip
        """MPI_Mprobe."""
        found = self._probed("Mprobe", source, tag, status)
        running().mail.take(found)
        return MatchedMessage(found)

    mprobe = Mprobe

    def Improbe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> MatchedMessage | None:  # fmt: skip
        """MPI_Improbe."""
        found = self._look("Improbe", source, tag)
        if found is None:
            return None
        describe(status, self._group().ranks.index(found.source), found.tag, found.nbytes)
        running().mail.take(found)
        return MatchedMessage(found)

    improbe = Improbe


@cache
def _largest_tag() -> int:
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)


def _check_tag(tag: int) -> None:
    if not 0 <= tag <= _largest_tag():
        raise MPI.Exception(MPI.ERR_TAG)


def _sending(name: str, buffered: bool | None) -> None:
    """Adds the four forms of a send: of a buffer or an object, blocking or posted."""

    def post_buffer(self: Messaging, buf: Any, dest: int, tag: int = 0) -> SimulatedRequest:
        data = buffers.packed(buf) if dest != MPI.PROC_NULL else bytearray()
        return self._send(f"I{name}", data, len(data), dest, tag, buffered)

    def post_object(self: Messaging, obj: Any, dest: int, tag: int = 0) -> SimulatedRequest:
        data = MPI.pickle.dumps(obj)
        return self._send(f"i{name}", data, len(data), dest, tag, buffered)

    def send_buffer(self: Messaging, buf: Any, dest: int, tag: int = 0) -> None:
        data = buffers.packed(buf) if dest != MPI.PROC_NULL else bytearray()
        self._send(name.capitalize(), data, len(data), dest, tag, buffered).Wait()

    def send_object(self: Messaging, obj: Any, dest: int, tag: int = 0) -> None:
        data = MPI.pickle.dumps(obj)
        self._send(name, data, len(data), dest, tag, buffered).Wait()

    for form, method in (
        (f"I{name}", post_buffer),
        (f"i{name}", post_object),
        (name.capitalize(), send_buffer),
        (name, send_object),
    ):
        setattr(Messaging, form, method)


for _name, _buffered in (("send", None), ("ssend", False), ("bsend", True), ("rsend", None)):
    _sending(_name, _buffered)


time_by_network(Messaging)
