"""The shared memory of one group of ranks of one host.

Each member owns a page of numbers (how often it has arrived, what it brought) and two blocks
for data. A rank may overwrite what it wrote two arrivals ago: everybody has arrived once since,
and so has read it.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.calls.call import EPOCH_SHIFT, Call
from allranks.collectives.calls.offer import Offer
from allranks.collectives.calls.wait import Steps, yield_core
from allranks.collectives.host.memory import ORDERED, fence

PAGE = 4096
DONE = 8
_HEAD = struct.Struct("=Qd")
_OFFER = struct.Struct("=QQQQQQ")
_OFFER_AT, _TEXT_AT = _HEAD.size, _HEAD.size + _OFFER.size
_TURN = 512, 512 + 1792
_TEXT_BYTES = 1792 - _TEXT_AT

_YIELDS = 200


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
        self._heads = [[(index * PAGE + start) // 8 for index in range(members)] for start in _TURN]
        self._word = [index * PAGE // 8 for index in range(members)]
        self._mine = self._word[me]
        self._others = [word for index, word in enumerate(self._word) if index != me]
        self._other_heads = [
            [(index, at) for index, at in enumerate(heads) if index != me] for heads in self._heads
        ]
        self._my_heads = [heads[me] for heads in self._heads]
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
        """Which of its blocks each member filled last; the same on all. A call takes its turn once
        it is posted: a rank that has left a call before that has taken none."""
        self._told = [b"", b""]
        self._offered: list[Offer | None] = [None, None]

    @staticmethod
    def nbytes(members: int) -> int:
        """Bytes that a channel for so many members needs."""
        return members * (PAGE + 2 * block_bytes(members))

    def renew(self, epoch: int) -> None:
        """Starts counting anew; every member does so before any arrives again."""
        self.count = epoch << EPOCH_SHIFT
        self.turn = 0

    def post(
        self, sequence: int, fingerprint: int, arrived: float, offer: Offer, text: bytes
    ) -> None:
        """Lays out what this rank brings; it counts once this rank has arrived.

        ``text`` says in words what it is and from which line, as `guard` packs it.
        """
        turn = sequence & 1
        at = self._my_heads[turn]
        self.words[at] = fingerprint
        self.times[at + 1] = arrived
        if offer is not self._offered[turn]:
            nbytes, place, copied, answered = offer
            _OFFER.pack_into(self.memory, 8 * at + _OFFER_AT, nbytes, *place, copied, answered)
            self._offered[turn] = offer
        if text and text is not self._told[turn]:
            start = 8 * at + _TEXT_AT
            cut = text[:_TEXT_BYTES]
            self.memory[start : start + len(cut)] = cut
            self._told[turn] = text

    def arrive(self, call: Call) -> bool:
        """Arrives; True where everybody else comes within as many moments as the call spends."""
        if not ORDERED:
            fence()
        count = self.count = self.count + 1
        words = self.words
        words[self._mine] = call.stage = count
        tries, spins = 0, call.spins
        for at in self._others:
            while words[at] < count:
                tries += 1
                if tries > spins:
                    if spins < 0 or tries > spins + _YIELDS:
                        return False
                    yield_core()
        if not ORDERED:
            fence()
        return True

    def others(self, call: Call) -> Steps[None]:
        """Ends when every member has arrived as often as this one."""
        count, words = self.count, self.words
        for at in self._others:
            while words[at] < count:
                yield call
        fence()

    def sync(self, call: Call) -> Steps[None]:
        """Arrives, and ends when every member has arrived as often as this one."""
        if not self.arrive(call):
            yield from self.others(call)

    def behind(self) -> tuple[int, ...]:
        """The members that have arrived less often than this one."""
        count = self.count
        return tuple(i for i, at in enumerate(self._word) if self.words[at] < count)

    def compare(self, sequence: int, fingerprint: int, arrived: float) -> tuple[bool, float, int]:
        """Whether all brought the same; when the last member arrived, and which one it was.

        ``arrived`` is when this one did.
        """
        words, times = self.words, self.times
        same, latest, who = True, arrived, self.me
        for index, at in self._other_heads[sequence & 1]:
            if words[at] != fingerprint:
                same = False
            arrived = times[at + 1]
            if arrived > latest:
                latest, who = arrived, index
        return same, latest, who

    def fingerprints(self, sequence: int) -> list[int]:
        """What each member brought."""
        return [self.words[at] for at in self._heads[sequence & 1]]

    def offered(self, sequence: int) -> list[bytes]:
        """The same as `offers`, as it lies there."""
        starts = [8 * head + _OFFER_AT for head in self._heads[sequence & 1]]
        return [self.memory[start : start + _OFFER.size] for start in starts]

    def offers(self, sequence: int) -> list[Offer]:
        """What each member has offered."""
        words, found = self.words, []
        for head in self._heads[sequence & 1]:
            at = head + _OFFER_AT // 8
            nbytes, segments, source, out, copied, answered = words[at : at + 6]
            found.append(Offer(nbytes, (segments, source, out), bool(copied), answered))
        return found

    def described(self, member: int, sequence: int) -> bytes:
        """What a member brought to a call and from which line, as it was packed."""
        start = member * PAGE + _TURN[sequence & 1] + _TEXT_AT
        return self.memory[start : start + _TEXT_BYTES]

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
