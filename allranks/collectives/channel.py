"""The shared memory of one group of ranks of one host. Runs in every rank.

Each member owns a page of numbers (how often it has arrived, what it brought) and two blocks
for data. A rank may overwrite what it wrote two arrivals ago: everybody has arrived once since,
and so has read it.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.memory import fence
from allranks.collectives.wait import Awaited, Steps

PAGE = 4096
DONE = 8
_HEAD, _HEAD_WORDS = 16, 8
_SPEC, _SPEC_BYTES = 512, 640
_SITE, _SITE_BYTES = 1792, 1024
EPOCH_SHIFT = 40
"""Counters hold the epoch in their upper bits: what an old epoch left counts as not arrived."""


def block_bytes(members: int) -> int:
    """Bytes of one block: as much as stays in the caches, less where many share the memory."""
    return min(256 << 10, max(16 << 10, (32 << 20) // (2 * members) // PAGE * PAGE))


class Channel:
    """One member's view of the group's shared memory."""

    def __init__(self, memory: mmap.mmap, members: int, me: int) -> None:
        self.memory = memory
        self.members, self.me = members, me
        self.block = block_bytes(members)
        self.words = memoryview(memory).cast("Q")
        self.times = memoryview(memory).cast("d")
        self._word = [index * PAGE // 8 for index in range(members)]
        self._mine = self._word[me]
        self._others = [word for index, word in enumerate(self._word) if index != me]
        data = np.frombuffer(memory, np.uint8)
        start = members * PAGE
        self.blocks: list[list[NDArray[np.uint8]]] = []
        for index in range(members):
            at = start + 2 * index * self.block
            self.blocks.append(
                [data[at + turn * self.block : at + (turn + 1) * self.block] for turn in (0, 1)]
            )
        self.count = 0
        self.turn = 0

    @staticmethod
    def nbytes(members: int) -> int:
        """Bytes that a channel for so many members needs."""
        return members * (PAGE + 2 * block_bytes(members))

    def renew(self, epoch: int) -> None:
        """Starts counting anew; every member does so before any arrives again."""
        self.count = epoch << EPOCH_SHIFT
        self.turn = 0

    def post(self, sequence: int, numbers: tuple[int, ...], arrived: float) -> None:
        """Lays out what this rank brings; it counts once `sync` says that it has arrived."""
        at = self._mine + _HEAD + (sequence & 1) * _HEAD_WORDS
        self.times[at] = arrived
        for number in numbers:
            at += 1
            self.words[at] = number

    def describe(self, sequence: int, spec: bytes, site: bytes) -> None:
        """Adds, in words, what this rank brings and from which line."""
        page, turn = self.me * PAGE, sequence & 1
        for start, size, data in ((_SPEC, _SPEC_BYTES, spec), (_SITE, _SITE_BYTES, site)):
            data = data[: size - 2]
            at = page + start + turn * size
            self.memory[at : at + 2 + len(data)] = len(data).to_bytes(2, "little") + data

    def sync(self, awaited: Awaited) -> Steps[None]:
        """Arrives, and ends when every member has arrived as often as this one."""
        fence()
        count = self.count = self.count + 1
        words = self.words
        words[self._mine] = count
        for at in self._others:
            while words[at] < count:
                yield awaited
        fence()

    def behind(self) -> tuple[int, ...]:
        """The members that have arrived less often than this one."""
        count = self.count
        return tuple(i for i, at in enumerate(self._word) if self.words[at] < count)

    def numbers(self, sequence: int, which: int) -> list[int]:
        """One of the numbers that each member posted for a call."""
        offset = _HEAD + (sequence & 1) * _HEAD_WORDS + 1 + which
        words = self.words
        return [words[at + offset] for at in self._word]

    def arrivals(self, sequence: int) -> list[float]:
        """When each member arrived at a call, in seconds on the host's clock."""
        offset = _HEAD + (sequence & 1) * _HEAD_WORDS
        times = self.times
        return [times[at + offset] for at in self._word]

    def described(self, member: int, sequence: int) -> tuple[bytes, bytes]:
        """What a member brought to a call, in words, and from which line."""
        texts = []
        for start, size in ((_SPEC, _SPEC_BYTES), (_SITE, _SITE_BYTES)):
            at = member * PAGE + start + (sequence & 1) * size
            length = min(int.from_bytes(self.memory[at : at + 2], "little"), size - 2)
            texts.append(self.memory[at + 2 : at + 2 + length])
        return texts[0], texts[1]

    def put(self, word: int, value: int) -> None:
        """Sets one of this member's numbers."""
        self.words[self._mine + word] = value

    def get(self, member: int, word: int) -> int:
        """One of a member's numbers."""
        return self.words[self._word[member] + word]

    def blocks_as(self, dtype: np.dtype[Any], count: int, turn: int) -> list[NDArray[Any]]:
        """Every member's block of one turn, its first ``count`` elements seen as ``dtype``."""
        nbytes = count * dtype.itemsize
        return [pair[turn][:nbytes].view(dtype) for pair in self.blocks]
