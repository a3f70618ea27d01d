"""Blocks of pinned memory through which arrays come down from a GPU and go up again, all at once.

Two blocks each way: one is copied while the other is worked on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.calls.call import NOWHERE, Call, Members, Offer
from allranks.collectives.calls.transport import Transport
from allranks.collectives.calls.wait import Steps
from allranks.collectives.gpu.api import Event
from allranks.collectives.gpu.device import Device
from allranks.collectives.host.shared import Shared
from allranks.collectives.host.window import place

Host = NDArray[Any]
BLOCK_BYTES = 4 << 20
"""Long enough that what Python does for a block is little beside its copy."""
Fill = Callable[[int, Host], None]
Move = Callable[[int, Host, Host], Steps[None]]


@dataclass(slots=True)
class Blocks:
    """A group's blocks on this rank, and where the other members' lie if they can be reached."""

    down: list[Host]
    up: list[Host]
    offers: list[list[Offer]]
    """For each of the two turns what every member offers; empty where they cannot be reached."""

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return int(self.down[0].nbytes)


class Pipeline:
    """The blocks of one group in one epoch, and the order in which they are used."""

    def __init__(self, members: Members, device: Device, host: Transport) -> None:
        self.members, self.device, self.host = members, device, host
        self._window = host.window if isinstance(host, Shared) else None
        self._blocks: Blocks | None = None

    def blocks(self, call: Call) -> Steps[Blocks]:
        """The group's blocks. Collective over the group, within a call that all agreed on."""
        if self._blocks is None:
            whole = self._memory()
            down = [whole[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in (0, 1)]
            up = [whole[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in (2, 3)]
            offers = yield from self._offers(call, down, up)
            self._blocks = Blocks(down, up, offers)
        return self._blocks

    def _memory(self) -> Host:
        """Pinned memory for four blocks, if possible where the other members can reach it.

        A group keeps it over its epochs: pinning takes longer than a block's way.
        """
        kept, number = self.device.blocks, self.members.number
        whole = kept.get(number)
        if whole is None:
            window, size = self._window, 4 * BLOCK_BYTES
            if window is not None:
                # Pages of its own: one that is shared with another region can be pinned only once.
                room = window.empty((size + PAGESIZE,), np.dtype(np.uint8), size + PAGESIZE)
                if room is not None:
                    start = -room.ctypes.data % PAGESIZE
                    whole = room[start : start + size]
            if whole is None or not self.device.pin(whole):
                whole = self.device.pinned(size)
            kept[number] = whole
        return whole

    def _offers(self, call: Call, down: list[Host], up: list[Host]) -> Steps[list[list[Offer]]]:
        window, size = self._window, self.members.size
        if window is None:
            return []
        mine = [
            place(window.place_of(source), window.place_of(out))
            for source, out in zip(down, up, strict=True)
        ]
        told = np.array(mine, np.int64).reshape(-1).view(np.uint8)
        every = yield from call.moved(self.host.allgather, told, [told.nbytes] * size)
        tables: list[Any] = [part.copy().view(np.int64).reshape(2, 3).tolist() for part in every]
        offers = [[Offer(place=tuple(table[turn])) for table in tables] for turn in (0, 1)]
        return [] if any(offer.place == NOWHERE for turn in offers for offer in turn) else offers

    def run(
        self, call: Call, blocks: Blocks, count: int, fill: Fill, move: Move, drain: Fill
    ) -> Steps[None]:
        """Takes ``count`` blocks through: down, between the ranks, and up.

        Args:
            call, blocks, count: whose they are, where they pass, how many on every member.
            fill: queues the copies of one block to host memory.
            move: what the ranks do with it there, collectively.
            drain: queues the copies of its result to the GPU.
        """
        device = self.device
        came: list[Event | None] = [None, None]
        went: list[Event | None] = [None, None]

        def begin(index: int) -> None:
            with device.behind_caller(call, device.down) as stream:
                fill(index, blocks.down[index % 2])
                came[index % 2] = device.event(stream)

        if count:
            begin(0)
        for index in range(count):
            turn = index % 2
            yield from self._until(call, came[turn])
            if index + 1 < count:
                begin(index + 1)
            # The block before last has to have gone up before anybody writes here again.
            yield from self._until(call, went[turn])
            yield from move(index, blocks.down[turn], blocks.up[turn])
            with device.behind_caller(call, device.up) as stream:
                drain(index, blocks.up[turn])
                went[turn] = device.event(stream)
        for event in went:
            yield from self._until(call, event)

    def _until(self, call: Call, event: Event | None) -> Steps[None]:
        if event is not None:
            yield from self.device.wait(event, call)
            self.device.events.give_back(event)
