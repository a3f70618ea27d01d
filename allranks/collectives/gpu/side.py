"""The GPUs of one group in one epoch: who sits where, and the way between them. In every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.gpu import seats
from allranks.collectives.gpu.nccl import Nccl
from allranks.collectives.gpu.staged import Staged

if TYPE_CHECKING:
    from allranks.collectives.arrays.reductions import Arithmetic
    from allranks.collectives.calls.call import Call
    from allranks.collectives.calls.wait import Steps
    from allranks.collectives.world.group import Group

Array = NDArray[Any]


class GpuWay(Protocol):
    """A transport of arrays on GPUs. All members have agreed, and every length is known."""

    name: str

    def allreduce(self, call: Call, source: Array, out: Array, how: Arithmetic) -> Steps[None]:
        """As `Transport.allreduce`."""

    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, how: Arithmetic
    ) -> Steps[None]:
        """As `Transport.reducescatter`."""

    def broadcast(self, call: Call, array: Array, root: int) -> Steps[None]:
        """As `Transport.broadcast`."""

    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int], root: int
    ) -> Steps[list[Array]]:
        """As `Transport.allgather`."""

    def alltoall(
        self, call: Call, source: Array, table: Sequence[Sequence[int]]
    ) -> Steps[list[Array]]:
        """The pieces for this member; table[i][j] bytes go from member i to member j."""

    def abandon(self) -> None:
        """Leaves what is under way; nothing writes to anybody's arrays after this."""


class GpuSide:
    """What a group's members know of each other's GPUs, and the transports that they have made."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._seats: list[seats.Seat] = []
        self._ways: dict[str, GpuWay] = {}

    def way(self, call: Call, wanted: str) -> Steps[GpuWay]:
        """The transport of a call, which all members have agreed on. Collective over the group.

        Raises:
            UsageError: what is wanted cannot be; on every member.
        """
        group, device = self.group, self.group.world.gpu
        assert device is not None
        if not self._seats:
            mine = device.seat(group.world.hosts[group.world.rank]).pack()
            self._seats = [seats.Seat.unpack(told) for told in (yield from tell(call, mine))]
        name = seats.choose(wanted, group.ranks, self._seats)
        way = self._ways.get(name)
        if way is None:
            way = Nccl(group, device) if name == "nccl" else Staged(group, device)
            # Before it is connected: what is half connected has to be left as well.
            self._ways[name] = way
        call.transport = name
        return way

    def abandon(self, calls: Iterable[Call]) -> None:
        """Leaves what is under way: these calls."""
        for way in self._ways.values():
            way.abandon()
        if self.group.world.gpu is not None:
            for call in calls:
                self.group.world.gpu.hold(call)


class OnGpu:
    """`Transport` over a group's GPUs: agreement and lengths on the host, the data as they say."""

    name = "gpu"

    def __init__(self, side: GpuSide, wanted: str) -> None:
        self.side, self.wanted = side, wanted

    def _way(self, call: Call, source: Array) -> Steps[GpuWay]:
        if not call.posted:
            yield from self.side.group.agree(call, source.nbytes)
        return (yield from self.side.way(call, self.wanted))

    def allreduce(self, call: Call, source: Array, out: Array, how: Arithmetic) -> Steps[None]:
        """As `Transport.allreduce`."""
        way = yield from self._way(call, source)
        call.held = [call.held, source, out]
        yield from way.allreduce(call, source, out, how)

    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, how: Arithmetic
    ) -> Steps[None]:
        """As `Transport.reducescatter`."""
        way = yield from self._way(call, source)
        call.held = [call.held, source, out]
        yield from way.reducescatter(call, source, bounds, out, how)

    def broadcast(self, call: Call, array: Array, root: int) -> Steps[None]:
        """As `Transport.broadcast`."""
        way = yield from self._way(call, array)
        call.held = array
        yield from way.broadcast(call, array, root)

    def allgather(
        self, call: Call, source: Array, lengths: list[int] | None = None, root: int = -1
    ) -> Steps[list[Array]]:
        """As `Transport.allgather`."""
        way = yield from self._way(call, source)
        if lengths is None:
            told = yield from tell(call, np.int64(source.nbytes).tobytes())
            lengths = [int(np.frombuffer(one, np.int64)[0]) for one in told]
        call.held = [call.held, source]
        return (yield from way.allgather(call, source, lengths, root))

    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Steps[list[Array]]:
        """As `Transport.alltoall`."""
        way = yield from self._way(call, source)
        row = np.array(lengths or [0] * self.side.group.size, np.int64)
        told = yield from tell(call, row.tobytes())
        table = [np.frombuffer(one, np.int64).tolist() for one in told]
        call.held = [call.held, source]
        return (yield from way.alltoall(call, source, table))


def tell(call: Call, mine: bytes) -> Steps[list[bytes]]:
    """Every member's few bytes on every member, through host memory, within a call."""
    group = call.group
    size = yield from group.host.allgather(
        call, np.array([len(mine)], np.int64).view(np.uint8), [8] * group.size
    )
    lengths = [int(one.view(np.int64)[0]) for one in size]
    parts = yield from group.host.allgather(call, np.frombuffer(mine, np.uint8), lengths)
    return [part.tobytes() for part in parts]
