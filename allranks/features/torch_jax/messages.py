"""Messages between two ranks, for torch's `send`, `recv`, `isend` and `irecv`.

A send posts the message at once. A receive takes the first message of its sender, group and tag, in
the order in which they were sent. Messages that arrive before their receive are kept here, so that
a sender never waits for the order of receives. They move whenever this rank waits in any call.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any

import numpy as np
from mpi4py import MPI

from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls.call import PointCall, Steps
from allranks.collectives.calls.mismatches import list_sites
from allranks.collectives.calls.sites import Site
from allranks.collectives.calls.specs import Spec
from allranks.collectives.mpi.transport import reports_death
from allranks.collectives.world.world import Group, World
from allranks.errors import CollectiveMismatch, StaleHandle

#: MPI's tag of these messages; torch's tag is in the head of each message.
_TAG = (1 << 14) - 1
_HEAD_BYTES = 512
_dumps, _loads = json.JSONEncoder().encode, json.JSONDecoder().decode
Post = Callable[..., MPI.Request]


class Head:
    """The description of a message, sent before its bytes."""

    def __init__(
        self, group: str, tag: int, dtype: str, shape: tuple[int, ...], site: Site
    ) -> None:
        self.group, self.tag, self.dtype, self.shape, self.site = group, tag, dtype, shape, site

    def pack(self) -> Array:
        name, line = self.site
        fields = [zlib.crc32(self.group.encode()), self.tag, self.dtype, self.shape, name, line]
        data = _dumps(fields).encode()
        if len(data) > _HEAD_BYTES:  # a long path
            data = _dumps([*fields[:4], "", line]).encode()
        return np.frombuffer(data.ljust(_HEAD_BYTES), np.uint8)


class IncomingMessage:
    """A message on its way to this rank, or here."""

    def __init__(self, source: int, data: Array) -> None:
        self.source, self.data = source, data
        self.held: list[Any] = [data]

    @property
    def complete(self) -> bool:
        return bool(self.held[1].Test())

    def read_head(self) -> None:
        group, tag, dtype, shape, name, line = _loads(self.data[:_HEAD_BYTES].tobytes().decode())
        self.key, self.dtype, self.shape = (group, tag), dtype, tuple(shape)
        self.site = Site(name, line)


class Transfer:
    """One send or receive of this rank."""

    done = False
    error: CollectiveMismatch | None = None
    source = -1
    """The rank of the world that has sent the received message."""

    def __init__(self, mailbox: Mailbox, spec: Spec, nbytes: int, peers: tuple[int, ...]) -> None:
        self._mailbox, self.spec, self.nbytes, self.peers = mailbox, spec, nbytes, peers
        self._epoch = mailbox.world.epoch
        self.posted = False

    def poll(self) -> bool:
        self._check()
        self._mailbox.progress()
        return self.done

    def wait(self, group: Group) -> None:
        """Waits for the transfer, and keeps it in the timings."""
        self._check()
        call = PointCall(group.agreement, self.spec, None, self.peers)
        call.nbytes, call.transport = self.nbytes, "mpi"
        call.steps = self._steps(call)
        self._mailbox.world.run(call)
        if self.error is not None:
            raise self.error

    def _steps(self, call: PointCall) -> Steps[None]:
        # The peer of a send may be about to receive: that is no deadlock yet.
        call.posted = self.posted
        self._mailbox.progress()
        while not self.done:
            yield call
            self._mailbox.progress()

    def _check(self) -> None:
        if not self.done and self._epoch != self._mailbox.world.epoch:
            raise StaleHandle(
                f"wait() needs a {self.spec.op} of this epoch: it was posted before an error or an "
                "interrupt ended its epoch. Post it again."
            )


class Receive(Transfer):
    """A receive: ``take`` gets the bytes."""

    key: tuple[int, int]
    take: Callable[[Array], None]
    site: Site

    def accepts(self, message: IncomingMessage) -> bool:
        return message.key == self.key and message.source in self.peers

    def finish(self, message: IncomingMessage) -> None:
        self.source, self.done = message.source, True
        found, data = message.dtype, message.data[_HEAD_BYTES:]
        if found != self.spec.dtype or data.nbytes != self.nbytes:
            rank = self._mailbox.world.rank
            lines = list_sites({message.source: message.site, rank: self.site})
            text = (
                f"send and recv need the same dtype and size: rank {message.source} has sent "
                f"{message.shape} of {found}, rank {rank} receives {self.spec.shape} of "
                f"{self.spec.dtype}. Receive into a tensor like the one that was sent."
            )
            self.error = CollectiveMismatch("\n".join([text, *lines]))
            return
        self.take(data)


class Mailbox:
    """The messages of one rank."""

    def __init__(self, world: World) -> None:
        assert world.mpi is not None
        self.world, self._comm = world, world.mpi.user
        self._begin()
        nudge = world.nudge

        def nudged() -> None:
            # Each 20 ms of a wait in any call: this rank may be the one that others wait for.
            if nudge is not None:
                nudge()
            try:
                self.progress()
            except MPI.Exception as error:
                if not reports_death(error):
                    raise

        world.nudge = nudged

    def _begin(self) -> None:
        self._epoch = self.world.epoch
        self._sends: list[tuple[Transfer, list[Any]]] = []
        self._receives: list[Receive] = []
        self._coming: list[IncomingMessage] = []
        self._arrived: list[IncomingMessage] = []

    def _renew(self) -> None:
        # MPI may still write to the buffers of an epoch that has ended: they are held for ever.
        if self._epoch != self.world.epoch:
            self._begin()

    def _hold(self, held: list[Any], post: Post, *arguments: Any) -> None:
        # In one step of the interpreter: an interrupt cannot come between the call and the list.
        self.world.held_requests[id(held)] = held
        held.extend(starmap(post, (arguments,)))

    def send(
        self, group: str, peer: int, tag: int, data: Array, dtype: str, shape: tuple[int, ...],
        site: Site,
    ) -> Transfer:  # fmt: skip
        """Posts a message to a rank of the world."""
        self._renew()
        transfer = Transfer(self, Spec("send", dtype=dtype, shape=shape), data.nbytes, (peer,))
        transfer.posted = True
        whole = np.concatenate([Head(group, tag, dtype, shape, site).pack(), data])
        if peer == self.world.rank:
            message = IncomingMessage(peer, whole)
            message.read_head()
            transfer.done = True
            self._deliver(message)
            return transfer
        held: list[Any] = [whole]
        self._hold(held, MPI.Intracomm.Isend, self._comm, whole, peer, _TAG)
        self._sends.append((transfer, held))
        self.progress()
        return transfer

    def receive(
        self, group: str, peers: Sequence[int], tag: int, take: Callable[[Array], None],
        nbytes: int, dtype: str, shape: tuple[int, ...], site: Site,
    ) -> Receive:  # fmt: skip
        """Posts a receive of a message from one of some ranks of the world."""
        self._renew()
        receive = Receive(self, Spec("recv", dtype=dtype, shape=shape), nbytes, tuple(peers))
        receive.key, receive.take, receive.site = (zlib.crc32(group.encode()), tag), take, site
        message = next(filter(receive.accepts, self._arrived), None)
        if message is not None:
            self._arrived.remove(message)
            receive.finish(message)
        else:
            self._receives.append(receive)
            self.progress()
        return receive

    def progress(self) -> None:
        """Moves what can be moved, without waiting."""
        self._renew()
        for entry in [entry for entry in self._sends if entry[1][1].Test()]:
            self._sends.remove(entry)
            self.world.held_requests.pop(id(entry[1]), None)
            entry[0].done = True
        status = MPI.Status()
        improbe = MPI.Intracomm.Improbe
        while (found := improbe(self._comm, MPI.ANY_SOURCE, _TAG, status)) is not None:
            message = IncomingMessage(
                status.Get_source(), np.empty(status.Get_count(MPI.BYTE), np.uint8)
            )
            self._hold(message.held, found.Irecv, message.data)
            self._coming.append(message)
        behind: set[int] = set()
        for message in list(self._coming):
            # Messages of one rank keep their order.
            if message.source in behind or not message.complete:
                behind.add(message.source)
                continue
            self._coming.remove(message)
            self.world.held_requests.pop(id(message.held), None)
            message.read_head()
            self._deliver(message)

    def _deliver(self, message: IncomingMessage) -> None:
        receive = next((one for one in self._receives if one.accepts(message)), None)
        if receive is None:
            self._arrived.append(message)
        else:
            self._receives.remove(receive)
            receive.finish(message)
