"""The GPUs of one group in one epoch: who sits where, and their transport."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import Call, Members, Move, Offer, prepared
from allranks.collectives.calls.transport import Transport
from allranks.collectives.calls.wait import Steps
from allranks.collectives.gpu import seats
from allranks.collectives.gpu.device import Device
from allranks.collectives.gpu.nccl import Nccl
from allranks.collectives.gpu.staged import Staged

GpuTransport = Nccl | Staged
"""Transports of arrays on GPUs. All members have agreed, and every length is known."""


class Gpus:
    """`Transport` over a group's GPUs: lengths are told on the host, data moves as they allow."""

    name = "gpu"

    def __init__(self, members: Members, device: Device, host: Transport, number: int) -> None:
        self.members, self.device, self.host = members, device, host
        self._number = number
        """Of this rank's host."""
        self._seats: list[seats.Seat] = []
        self._transports: dict[str, GpuTransport] = {}

    def _transport(self, call: Call) -> Steps[GpuTransport]:
        """The transport of a call, which all members have agreed on. Collective over the group.

        Raises:
            UsageError: what is wanted cannot be; on every member.
        """
        if not self._seats:
            mine = self.device.seat(self._number).pack()
            self._seats = [seats.Seat.unpack(told) for told in (yield from self.tell(call, mine))]
        wanted = "" if call.transport == self.name else call.transport
        name = seats.choose(wanted, self.members.ranks, self._seats)
        found = self._transports.get(name)
        if found is None:
            make = Nccl if name == "nccl" else Staged
            # Before it is connected: what is half connected has to be left as well.
            found = self._transports[name] = make(self.members, self.device, self.host)
        call.transport = name
        return found

    def tell(self, call: Call, mine: bytes) -> Steps[list[bytes]]:
        """Every member's few bytes on every member, through host memory, within a call."""
        length = np.array([len(mine)], np.int64).view(np.uint8)
        sizes = [8] * self.members.size
        told = yield from call.moved(self.host.allgather, length, sizes)
        lengths = [int(one.view(np.int64)[0]) for one in told]
        data = np.frombuffer(mine, np.uint8)
        parts = yield from call.moved(self.host.allgather, data, lengths)
        return [part.tobytes() for part in parts]

    def abandon(self, calls: Iterable[Call]) -> None:
        """Leaves what is under way: these calls."""
        for transport in self._transports.values():
            transport.abandon()
        for call in calls:
            self.device.hold(call)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array on this rank's GPU."""
        out: Array = self.device.empty(shape, dtype)
        return out

    def renew(self) -> None:
        """What is known of the GPUs is known anew in each epoch."""

    @prepared
    def allreduce(
        self, call: Call, source: Array, how: Arithmetic, out: Array | None = None
    ) -> Move[Array]:
        """As `Transport.allreduce`."""
        found = self.empty(source.shape, source.dtype) if out is None else out
        yield Offer(source.nbytes)
        way = yield from self._way(call, source, found)
        into = found.reshape(-1)
        flat = into if source is found else source.reshape(-1)
        yield from way.allreduce(call, flat, into, how)
        return found

    @prepared
    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, how: Arithmetic
    ) -> Move[None]:
        """As `Transport.reducescatter`."""
        yield Offer(source.nbytes)
        way = yield from self._way(call, source, out)
        yield from way.reducescatter(call, source, bounds, out, how)

    @prepared
    def broadcast(self, call: Call, array: Array, root: int) -> Move[None]:
        """As `Transport.broadcast`."""
        yield Offer(array.nbytes)
        way = yield from self._way(call, array)
        yield from way.broadcast(call, array, root)

    @prepared
    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Move[list[Array]]:
        """As `Transport.allgather`."""
        yield Offer(source.nbytes)
        sizes = lengths or [offer.nbytes for offer in call.agreement.offers(call)]
        way = yield from self._way(call, source)
        return (yield from way.allgather(call, source, sizes, root))

    @prepared
    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Move[list[Array]]:
        """As `Transport.alltoall`."""
        yield Offer(source.nbytes)
        way = yield from self._way(call, source)
        row = np.array(lengths or [0] * self.members.size, np.int64)
        told = yield from self.tell(call, row.tobytes())
        table = [np.frombuffer(one, np.int64).tolist() for one in told]
        return (yield from way.alltoall(call, source, table))

    def _way(self, call: Call, *arrays: Array) -> Steps[GpuTransport]:
        """The transport of a call, which keeps these arrays."""
        way = yield from self._transport(call)
        call.held = [call.held, *arrays]
        return way
