"""The transport between GPUs through pinned host memory, for ranks that share a GPU.

Arrays move in blocks, two each way: while the ranks reduce one block on the host, the next one is
copied from the GPU and the one before is copied back. Where the ranks share memory the blocks are
in it, so that no rank copies to send: each reduces its slice of every rank's block and writes it
into every rank's result, which is copied to the GPU from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from mmap import PAGESIZE
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.arrays.reductions import Arithmetic
from allranks.collectives.calls.call import (
    NOWHERE,
    Call,
    Members,
    Offer,
    Prepared,
    Steps,
    Transport,
    as_bytes,
    cut,
)
from allranks.collectives.gpu.cupy_api import CudaEvent
from allranks.collectives.gpu.device import Device
from allranks.collectives.host.memory import place
from allranks.collectives.host.shared_memory import SharedMemoryTransport

GpuArray = Any
Host = NDArray[Any]
BLOCK_BYTES = 4 << 20
"""Large enough that the time of Python's code for a block is small beside its copy."""
Copy = Callable[[int, Host], None]
Copied = tuple[CudaEvent, CudaEvent]
"""The events before and after a copy."""


class StagedTransport:
    """Transport of GPU arrays by the group's transport between host memories."""

    name = "staged"

    def __init__(self, members: Members, device: Device, host: Transport) -> None:
        self.members, self.device, self.host = members, device, host
        self._window = host.window if isinstance(host, SharedMemoryTransport) else None
        self._down: list[Host] = []
        self._up: list[Host] = []
        """The group's blocks on this rank, for each of the two turns."""
        self._offers: list[list[Offer]] = []
        """For each turn the places of every member's blocks; empty without shared memory."""

    def abandon(self) -> None:
        """Does nothing: no work on the GPU waits for others. `GpuTransport` keeps the arrays."""

    def confirm(self, call: Call) -> Steps[None]:
        """Needs nothing: no block is read before its members have counted it as written."""
        yield from ()

    def connect(self, call: Call) -> Steps[None]:
        """Allocates the blocks of this epoch, the first time. Collective; all have agreed."""
        if not self._down:
            blocks = list(self._memory().reshape(4, BLOCK_BYTES))
            offers = yield from self._shared_places(call, blocks[:2], blocks[2:])
            self._down, self._up, self._offers = blocks[:2], blocks[2:], offers

    def _memory(self) -> Host:
        """Pinned memory for four blocks, if possible in shared memory."""
        # A group keeps it over its epochs: pinning takes longer than moving a block.
        kept, number = self.device.blocks, self.members.number
        whole = kept.get(number)
        if whole is None:
            window, size = self._window, 4 * BLOCK_BYTES
            if window is not None:
                # Whole pages: a page shared with another region can be pinned only once.
                room = window.empty((size + PAGESIZE,), np.dtype(np.uint8), size + PAGESIZE)
                if room is not None:
                    start = -room.ctypes.data % PAGESIZE
                    whole = room[start : start + size]
            if whole is None or not self.device.pin(whole):
                whole = self.device.pinned(size)
            kept[number] = whole
        return whole

    def _shared_places(
        self, call: Call, down: list[Host], up: list[Host]
    ) -> Steps[list[list[Offer]]]:
        window = self._window
        if window is None:
            return []
        mine = [
            place(window.place_of(source), window.place_of(out))
            for source, out in zip(down, up, strict=True)
        ]
        own = as_bytes(np.array(mine, np.int64))
        every = yield from call.moved(self.host.allgather, own, [own.nbytes] * self.members.size)
        tables: list[Any] = [part.copy().view(np.int64).reshape(2, 3).tolist() for part in every]
        offers = [[Offer(place=tuple(table[turn])) for table in tables] for turn in (0, 1)]
        return [] if any(offer.place == NOWHERE for turn in offers for offer in turn) else offers

    def _pipeline(
        self,
        call: Call,
        count: int,
        fill: Copy,
        move: Callable[[int, Host, Host], Steps[None]],
        drain: Copy,
    ) -> Steps[None]:
        """Moves ``count`` blocks: ``fill`` queues copies from the GPU, ``move`` moves a block
        between the ranks, collectively, and ``drain`` queues copies to the GPU.
        """
        device = self.device
        came: list[Copied | None] = [None, None]
        went: list[Copied | None] = [None, None]

        def begin(index: int) -> None:
            with device.behind_caller(call, device.down) as stream:
                began = device.event(stream, timed=True)
                fill(index, self._down[index % 2])
                came[index % 2] = began, device.event(stream, timed=True)

        if count:
            begin(0)
        for index in range(count):
            turn = index % 2
            yield from self._until(call, came[turn])
            if index + 1 < count:
                begin(index + 1)
            # The block before last must be on the GPU before a rank writes here again.
            yield from self._until(call, went[turn])
            yield from move(index, self._down[turn], self._up[turn])
            with device.behind_caller(call, device.up) as stream:
                began = device.event(stream, timed=True)
                drain(index, self._up[turn])
                went[turn] = began, device.event(stream, timed=True)
        for copied in went:
            yield from self._until(call, copied)

    def _until(self, call: Call, copied: Copied | None) -> Steps[None]:
        """Ends when a copy has, whose time by the GPU's clock it adds to the call."""
        if copied is not None:
            yield from self.device.wait(copied[1], call)
            self.device.add_seconds(call, *copied)
            self.device.events.give_back(*copied, timed=True)

    def allreduce(
        self, call: Call, source: GpuArray, out: GpuArray, reduction: Arithmetic
    ) -> Steps[None]:
        step, width, host = BLOCK_BYTES // source.itemsize, source.itemsize, self.host

        def fill(index: int, block: Host) -> None:
            self.device.copy_down(block, source[index * step : (index + 1) * step])

        def move(index: int, down: Host, up: Host) -> Steps[None]:
            nbytes = min(step, source.size - index * step) * width
            mine, into = (block[:nbytes].view(reduction.dtype) for block in (down, up))
            if not self._offers or not isinstance(host, SharedMemoryTransport):
                yield from call.moved(host.allreduce, mine, reduction, into)
                return
            # In place: the block is in shared memory, where other members read it.
            if reduction.prescale != 1.0:
                reduction.staged(mine, mine)
            yield from call.agreement.barrier(call)
            offers = self._offers[index % 2]
            yield from host.reduce_in_place(call, offers, mine, into, reduction, copied=False)

        def drain(index: int, block: Host) -> None:
            self.device.copy_up(out[index * step : (index + 1) * step], block)

        yield from self._pipeline(call, -(-source.size // step), fill, move, drain)

    def reducescatter(
        self,
        call: Call,
        source: GpuArray,
        bounds: Sequence[int],
        out: GpuArray,
        reduction: Arithmetic,
    ) -> Steps[None]:
        """Reduces block by block; each member keeps its own part of each."""
        step, width = BLOCK_BYTES // source.itemsize, source.itemsize
        first, last = bounds[self.members.me], bounds[self.members.me + 1]

        def own(index: int) -> tuple[int, int]:
            low = max(first, index * step)
            return low, max(low, min(last, source.size, (index + 1) * step))

        def fill(index: int, block: Host) -> None:
            self.device.copy_down(block, source[index * step : (index + 1) * step])

        def move(index: int, down: Host, up: Host) -> Steps[None]:
            start, (low, high) = index * step, own(index)
            count = min(step, source.size - start)
            mine = down[: count * width].view(reduction.dtype)
            into = up[: (high - low) * width].view(reduction.dtype)
            inside = [min(max(bound - start, 0), count) for bound in bounds]
            yield from call.moved(self.host.reducescatter, mine, inside, into, reduction)

        def drain(index: int, block: Host) -> None:
            low, high = own(index)
            self.device.copy_up(out[low - first : high - first], block)

        yield from self._pipeline(call, -(-source.size // step), fill, move, drain)

    def broadcast(self, call: Call, array: GpuArray, root: int) -> Steps[None]:
        step, mine = BLOCK_BYTES, self.members.me == root

        def fill(index: int, block: Host) -> None:
            if mine:
                self.device.copy_down(block, array[index * step : (index + 1) * step])

        def move(index: int, down: Host, up: Host) -> Steps[None]:
            there = (down if mine else up)[: min(step, array.nbytes - index * step)]
            yield from call.moved(self.host.broadcast, there, root)

        def drain(index: int, block: Host) -> None:
            if not mine:
                self.device.copy_up(array[index * step : (index + 1) * step], block)

        yield from self._pipeline(call, -(-array.nbytes // step), fill, move, drain)

    def allgather(
        self, call: Call, source: GpuArray, lengths: Sequence[int], root: int
    ) -> Steps[list[GpuArray]]:
        incoming = list(lengths) if root in (-1, self.members.me) else [0] * len(lengths)

        def exchange(call: Call, mine: Host, sizes: list[list[int]]) -> Prepared[list[Host]]:
            return self.host.allgather(call, mine, [row[0] for row in sizes], root)

        whole = [[length] for length in lengths]
        return self._pieces(call, source, whole, incoming, exchange)

    def alltoall(
        self, call: Call, source: GpuArray, table: Sequence[Sequence[int]]
    ) -> Steps[list[GpuArray]]:
        """Each block holds a part of every member's piece."""
        me = self.members.me

        def exchange(call: Call, mine: Host, sizes: list[list[int]]) -> Prepared[list[Host]]:
            return self.host.alltoall(call, mine, sizes[me])

        return self._pieces(call, source, table, [row[me] for row in table], exchange)

    def _pieces(
        self,
        call: Call,
        source: GpuArray,
        table: Sequence[Sequence[int]],
        incoming: Sequence[int],
        exchange: Callable[[Call, Host, list[list[int]]], Prepared[list[Host]]],
    ) -> Steps[list[GpuArray]]:
        """Pieces that differ in size, some of each in every block. ``table`` holds the bytes of
        each member's pieces; ``incoming`` of those for this one.
        """
        step = BLOCK_BYTES // self.members.size
        mine = table[self.members.me]
        out = self.device.empty((sum(incoming),), source.dtype)
        call.held = [call.held, out]

        def inside(length: int, index: int) -> int:
            return max(0, min(step, length - index * step))

        def spans(index: int, lengths: Sequence[int]) -> Iterator[tuple[slice, slice]]:
            """For each piece its part's place in a block, and in the whole array."""
            at = start = 0
            for length in lengths:
                low, count = start + index * step, inside(length, index)
                yield slice(at, at + count), slice(low, low + count)
                at, start = at + count, start + length

        def fill(index: int, block: Host) -> None:
            for here, there in spans(index, mine):
                self.device.copy_down(block[here], source[there])

        def move(index: int, down: Host, up: Host) -> Steps[None]:
            sizes = [[inside(length, index) for length in row] for row in table]
            came = yield from call.moved(exchange, down[: sum(sizes[self.members.me])], sizes)
            for piece, (here, _) in zip(came, spans(index, incoming), strict=True):
                up[here] = piece[: here.stop - here.start]

        def drain(index: int, block: Host) -> None:
            for here, there in spans(index, incoming):
                self.device.copy_up(out[there], block[here])

        longest = max((length for row in table for length in row), default=0)
        yield from self._pipeline(call, -(-longest // step), fill, move, drain)
        return cut(out, incoming)
