"""Data between GPUs through pinned host memory, for ranks that share a GPU.

Arrays move in blocks: while the ranks reduce one block on the host, the next one comes down from
the GPU and the one before goes up again. Where the ranks share memory the blocks lie in it, so
that nobody copies to send: each rank reduces its slice of everybody's block and writes it into
everybody's result, from where it goes up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from allranks.collectives.arrays.reductions import Arithmetic
from allranks.collectives.calls.call import Call, Members
from allranks.collectives.calls.transport import Transport, cut
from allranks.collectives.calls.wait import Steps
from allranks.collectives.gpu.device import Device
from allranks.collectives.gpu.pipeline import Blocks, Pipeline
from allranks.collectives.host.shared import Shared

GpuArray = Any
Host = NDArray[Any]


class Staged:
    """Transport of arrays on GPUs through the group's transport between host memories."""

    name = "staged"

    def __init__(self, members: Members, device: Device, host: Transport) -> None:
        self.members, self.device, self.host = members, device, host
        self.pipeline = Pipeline(members, device, host)

    def abandon(self) -> None:
        """Nothing runs that waits for others; the arrays of calls that were left are kept."""

    def allreduce(
        self, call: Call, source: GpuArray, out: GpuArray, how: Arithmetic
    ) -> Steps[None]:
        """Reduces block by block."""
        blocks = yield from self.pipeline.blocks(call)
        step = blocks.nbytes // source.itemsize

        def fill(index: int, host: Host) -> None:
            self.device.copy_down(host, source[index * step : (index + 1) * step])

        def move(index: int, down: Host, up: Host) -> Steps[None]:
            count = min(step, source.size - index * step)
            mine, into = (each[: count * source.itemsize].view(how.dtype) for each in (down, up))
            yield from self._reduce(call, blocks, index, mine, into, how)

        def drain(index: int, host: Host) -> None:
            self.device.copy_up(out[index * step : (index + 1) * step], host)

        yield from self.pipeline.run(call, blocks, _count(source.size, step), fill, move, drain)

    def _reduce(
        self, call: Call, blocks: Blocks, index: int, mine: Host, out: Host, how: Arithmetic
    ) -> Steps[None]:
        """One block's reduction on the host."""
        host = self.host
        if not blocks.offers or not isinstance(host, Shared):
            yield from call.moved(host.allreduce, mine, how, out)
            return
        if how.prescale != 1.0:
            how.staged(mine, mine)
        yield from call.agreement.meet(call)
        offers = blocks.offers[index % 2]
        yield from host.in_windows(call, offers, mine, out, how, copied=False)

    def reducescatter(
        self, call: Call, source: GpuArray, bounds: Sequence[int], out: GpuArray, how: Arithmetic
    ) -> Steps[None]:
        """Reduces block by block; each member keeps what is its own of each."""
        blocks = yield from self.pipeline.blocks(call)
        step = blocks.nbytes // source.itemsize
        me, width = self.members.me, source.itemsize
        first = bounds[me]

        def own(index: int) -> tuple[int, int]:
            start, end = index * step, min(source.size, (index + 1) * step)
            return max(first, start), max(max(first, start), min(bounds[me + 1], end))

        def fill(index: int, host: Host) -> None:
            self.device.copy_down(host, source[index * step : (index + 1) * step])

        def move(index: int, down: Host, up: Host) -> Steps[None]:
            start = index * step
            count = min(step, source.size - start)
            low, high = own(index)
            mine = down[: count * width].view(how.dtype)
            into = up[: (high - low) * width].view(how.dtype)
            inside = [min(max(bound - start, 0), count) for bound in bounds]
            yield from call.moved(self.host.reducescatter, mine, inside, into, how)

        def drain(index: int, host: Host) -> None:
            low, high = own(index)
            self.device.copy_up(out[low - first : high - first], host)

        yield from self.pipeline.run(call, blocks, _count(source.size, step), fill, move, drain)

    def broadcast(self, call: Call, array: GpuArray, root: int) -> Steps[None]:
        """The root's bytes come down, and go up everywhere else."""
        blocks = yield from self.pipeline.blocks(call)
        step, mine = blocks.nbytes, self.members.me == root

        def part(index: int) -> GpuArray:
            return array[index * step : (index + 1) * step]

        def fill(index: int, host: Host) -> None:
            if mine:
                self.device.copy_down(host, part(index))

        def move(index: int, down: Host, up: Host) -> Steps[None]:
            there = (down if mine else up)[: min(step, array.nbytes - index * step)]
            yield from call.moved(self.host.broadcast, there, root)

        def drain(index: int, host: Host) -> None:
            if not mine:
                self.device.copy_up(part(index), host)

        yield from self.pipeline.run(call, blocks, _count(array.nbytes, step), fill, move, drain)

    def allgather(
        self, call: Call, source: GpuArray, lengths: Sequence[int], root: int
    ) -> Steps[list[GpuArray]]:
        """Everybody's blocks meet on the host, of every member or of the root."""
        incoming = list(lengths) if root in (-1, self.members.me) else [0] * len(lengths)

        def move(call: Call, mine: Host, sizes: list[list[int]]) -> Steps[list[Host]]:
            each = [row[0] for row in sizes]
            return (yield from call.moved(self.host.allgather, mine, each, root))

        whole = [[length] for length in lengths]
        return (yield from self._pieces(call, source, whole, incoming, move))

    def alltoall(
        self, call: Call, source: GpuArray, table: Sequence[Sequence[int]]
    ) -> Steps[list[GpuArray]]:
        """Each block holds some of what goes to every member."""
        members = self.members

        def move(call: Call, mine: Host, sizes: list[list[int]]) -> Steps[list[Host]]:
            return (yield from call.moved(self.host.alltoall, mine, sizes[members.me]))

        incoming = [row[members.me] for row in table]
        return (yield from self._pieces(call, source, table, incoming, move))

    def _pieces(
        self,
        call: Call,
        source: GpuArray,
        table: Sequence[Sequence[int]],
        incoming: Sequence[int],
        meet: Callable[[Call, Host, list[list[int]]], Steps[list[Host]]],
    ) -> Steps[list[GpuArray]]:
        """Pieces that differ in size, some of each in every block.

        ``table`` holds the bytes of each member's pieces; ``incoming`` those that come here.
        """
        blocks = yield from self.pipeline.blocks(call)
        step = blocks.nbytes // self.members.size
        mine = table[self.members.me]
        out = self.device.empty((sum(incoming),), source.dtype)
        call.held = [call.held, out]

        def inside(length: int, index: int) -> int:
            return max(0, min(step, length - index * step))

        def spans(index: int, lengths: Sequence[int]) -> Iterator[tuple[slice, slice]]:
            """For each piece where some of it lies in a block, and where in the whole."""
            at = start = 0
            for length in lengths:
                low, count = start + index * step, inside(length, index)
                yield slice(at, at + count), slice(low, low + count)
                at, start = at + count, start + length

        def fill(index: int, host: Host) -> None:
            for here, there in spans(index, mine):
                self.device.copy_down(host[here], source[there])

        def move(index: int, down: Host, up: Host) -> Steps[None]:
            sizes = [[inside(length, index) for length in row] for row in table]
            came = yield from meet(call, down[: sum(sizes[self.members.me])], sizes)
            for piece, (here, _) in zip(came, spans(index, incoming), strict=True):
                up[here] = piece[: here.stop - here.start]

        def drain(index: int, host: Host) -> None:
            for here, there in spans(index, incoming):
                self.device.copy_up(out[there], host[here])

        longest = max((length for row in table for length in row), default=0)
        yield from self.pipeline.run(call, blocks, _count(longest, step), fill, move, drain)
        return cut(out, incoming)


def _count(size: int, step: int) -> int:
    return -(-size // step)
