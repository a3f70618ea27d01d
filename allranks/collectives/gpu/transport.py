"""The transport of a group whose arrays are on GPUs: it chooses NCCL or staging for each call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import Call, Members, Move, Offer, Steps, Transport, prepared
from allranks.collectives.gpu import placement
from allranks.collectives.gpu.device import Device
from allranks.collectives.gpu.nccl import NcclTransport
from allranks.collectives.gpu.staged import StagedTransport

T = TypeVar("T")
DeviceTransport = NcclTransport | StagedTransport
"""The transports of GPU arrays, used once all members have agreed and all lengths are known."""


class GpuTransport:
    """`Transport` over a group's GPUs: lengths go by the host, data by NCCL or staged."""

    name = "gpu"

    def __init__(self, members: Members, device: Device, host: Transport, number: int) -> None:
        self.members, self.device, self.host = members, device, host
        self._number = number
        """The number of this rank's host."""
        self._device_map: list[placement.RankDevice] = []
        self._transports: dict[str, DeviceTransport] = {}

    def _transport(self, call: Call) -> Steps[DeviceTransport]:
        """The transport of a call, which all members have agreed on. Collective over the group.
        Raises `UsageError` on every member if the wanted transport cannot be used.
        """
        if not self._device_map:
            mine = self.device.describe(self._number).pack()
            self._device_map = [
                placement.RankDevice.unpack(shared)
                for shared in (yield from self.share(call, mine))
            ]
        wanted = "" if call.transport == self.name else call.transport
        name = placement.choose(wanted, self.members.ranks, self._device_map)
        found = self._transports.get(name)
        if found is None:
            make = NcclTransport if name == "nccl" else StagedTransport
            # Stored before it is connected, so that a half connected one can be abandoned too.
            found = self._transports[name] = make(self.members, self.device, self.host)
        call.transport = name
        return found

    def share(self, call: Call, mine: bytes) -> Steps[list[bytes]]:
        """Every member's few bytes on every member, through host memory."""
        length = np.array([len(mine)], np.int64).view(np.uint8)
        sizes = [8] * self.members.size
        shared = yield from call.moved(self.host.allgather, length, sizes)
        lengths = [int(one.view(np.int64)[0]) for one in shared]
        data = np.frombuffer(mine, np.uint8)
        parts = yield from call.moved(self.host.allgather, data, lengths)
        return [part.tobytes() for part in parts]

    def abandon(self, calls: Iterable[Call]) -> None:
        """Ends the calls under way, and keeps their arrays while the GPU may use them."""
        for transport in self._transports.values():
            transport.abandon()
        for call in calls:
            self.device.hold(call)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        out: Array = self.device.empty(shape, dtype)
        return out

    def renew(self) -> None:
        """Does nothing: `Group` makes a new one for each epoch."""

    @prepared
    def allreduce(
        self, call: Call, source: Array, reduction: Arithmetic, out: Array | None = None
    ) -> Move[Array]:
        found = self.empty(source.shape, source.dtype) if out is None else out
        yield Offer(source.nbytes)
        way = yield from self._way(call, source, found)
        into = found.reshape(-1)
        flat = into if source is found else source.reshape(-1)
        yield from self._in_turn(call, way.allreduce(call, flat, into, reduction))
        return found

    @prepared
    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, reduction: Arithmetic
    ) -> Move[None]:
        yield Offer(source.nbytes)
        way = yield from self._way(call, source, out)
        yield from self._in_turn(call, way.reducescatter(call, source, bounds, out, reduction))

    @prepared
    def broadcast(self, call: Call, array: Array, root: int) -> Move[None]:
        yield Offer(array.nbytes)
        way = yield from self._way(call, array)
        yield from self._in_turn(call, way.broadcast(call, array, root))

    @prepared
    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Move[list[Array]]:
        yield Offer(source.nbytes)
        sizes = lengths or [offer.nbytes for offer in call.agreement.offers(call)]
        way = yield from self._way(call, source)
        return (yield from self._in_turn(call, way.allgather(call, source, sizes, root)))

    @prepared
    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Move[list[Array]]:
        yield Offer(source.nbytes)
        way = yield from self._way(call, source)
        row = np.array(lengths or [0] * self.members.size, np.int64)
        shared = yield from self.share(call, row.tobytes())
        table = [np.frombuffer(one, np.int64).tolist() for one in shared]
        return (yield from self._in_turn(call, way.alltoall(call, source, table)))

    def _way(self, call: Call, *arrays: Array) -> Steps[DeviceTransport]:
        way = yield from self._transport(call)
        call.held = [call.held, *arrays]
        return way

    def _in_turn(self, call: Call, steps: Steps[T]) -> Steps[T]:
        """A move's steps; through NCCL, at its turn among the calls of all process sets."""
        # All ranks have the same process sets: making one is a call of all ranks.
        if call.transport != "nccl" or not self.device.sets or self.members.size == 1:
            return (yield from steps)
        try:
            yield from self.device.call_order.enter(call, self.host)
            return (yield from steps)
        finally:
            self.device.call_order.leave(call)
