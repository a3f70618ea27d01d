"""What the ranks of one host share where a group is on several: a channel, and what is laid out
there by the host's first rank, who alone hears of the others.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.wait import yield_core
from allranks.collectives.host.channel import OFFER_AT, YIELDS, Channel
from allranks.collectives.host.memory import fence, rounded

AGREED, DONE, LENGTH, LAST_RANK, LAST = 0, 8, 16, 17, 18
"""Words of the desk: the last call agreed on, the last chunk that is there, and of that call the
length of what is wrong with it, who came last and when."""
_HEAD, TEXT_MOST = 256, 16 << 10


class HostChannel(Channel):
    """The channel of one host's members, which tells whether they agree and ends nothing."""

    most_block_bytes, most_bytes = 512 << 10, 16 << 20
    """What goes between hosts takes longer than what the caches save."""

    def _agree(self, call: Call) -> bool:
        # Only the first rank waits for the others; these wait for it.
        count = self.count
        return self.members.me == 0 and all(
            self.words[page] >= count or self._comes(page) for _, page, _ in self._others
        )

    def show(self) -> None:
        """Arrives as often as is counted; only the first rank waits for the others."""
        self.words[self._mine] = self.count

    def complete(self) -> bool:
        """Whether all members have arrived as often as this one."""
        return all(self.words[page] >= self.count for _, page, _ in self._others)

    def blocks_as(self, dtype: np.dtype[Any], count: int, turn: int) -> list[Array]:
        """Every member's block of one turn, its first ``count`` elements seen as ``dtype``."""
        nbytes = count * dtype.itemsize
        return [pair[turn][:nbytes].view(dtype) for pair in self.blocks]

    def sizes(self, call: Call) -> list[int]:
        """How many bytes each member offers."""
        return [self.words[head + OFFER_AT // 8] for head in self._heads[call.number & 1]]

    def compared(self, call: Call) -> tuple[bool, float, int]:
        """Whether all members brought the same, and when the last one came, and who that was."""
        heads = self._heads[call.number & 1]
        same = all(self.words[head] == call.packed.fingerprint for head in heads)
        last, me = max((self.times[head + 1], index) for index, head in enumerate(heads))
        return same, last, self.members.ranks[me]


class Desk:
    """What a host's first rank lays out for the others: verdicts, and what other hosts sent."""

    def __init__(self, memory: mmap.mmap, here: int, members: int) -> None:
        start, slot = rounded(HostChannel.nbytes(here)), HostChannel.block_bytes(here)
        self.words = memoryview(memory).cast("Q")[start // 8 : (start + _HEAD) // 8]
        self.times = memoryview(memory).cast("d")[start // 8 : (start + _HEAD) // 8]
        self.offers = np.frombuffer(memory, np.int64, members, start + _HEAD)
        """Of each member, host by host; and the same as bytes."""
        self.offered = memoryview(memory)[start + _HEAD : start + _HEAD + 8 * members]
        at = start + rounded(_HEAD + 8 * members)
        self.text = np.frombuffer(memory, np.uint8, TEXT_MOST, at)
        at += TEXT_MOST
        self.slots = [np.frombuffer(memory, np.uint8, slot, at + turn * slot) for turn in (0, 1)]

    def comes(self, number: int, own: Standing) -> bool:
        """Whether a call is agreed on within moments: other hosts are heard of first."""
        tries = 0
        while self.words[AGREED] < number:
            tries += 1
            if own.pending or tries > YIELDS:
                return False
            yield_core()
        fence()
        return True


def nbytes(hosts: int, here: int, members: int) -> int:
    """Bytes of memory of a group on so many hosts, with so many of its members on this one."""
    if hosts == 1:
        return rounded(Channel.nbytes(here))
    desk = rounded(_HEAD + 8 * members) + TEXT_MOST + 2 * HostChannel.block_bytes(here)
    return rounded(HostChannel.nbytes(here)) + desk
