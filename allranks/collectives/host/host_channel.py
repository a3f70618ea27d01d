"""The channel of a group's members on one of several hosts, and their leader's buffer.

The members on one host share both. The host's first rank, its leader, writes to the buffer what it
has received from the other hosts.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls.call import Call, yield_core
from allranks.collectives.calls.rank_state import RankState
from allranks.collectives.host.memory import fence, rounded
from allranks.collectives.host.shared_memory import OFFER_AT, YIELDS, Channel

AGREED, DONE, LENGTH, LAST_RANK, LAST = 0, 8, 16, 17, 18
"""Words of the buffer: the number of the last call agreed on, the last chunk that is ready, and for
that call the length of its error text, the last rank to arrive, and when it arrived."""
_BUFFER_HEAD, TEXT_MOST = 256, 16 << 10


class HostChannel(Channel):
    """The channel of one host's members where the group has members on other hosts.

    It reports whether its members agree; `MultiHostAgreement` ends the call.
    """

    most_block_bytes, most_bytes = 512 << 10, 16 << 20
    """Larger than on one host: the transfer between hosts takes longer than the caches save."""

    def _compare(self, call: Call) -> bool:
        # Only the first rank waits for the others; these wait for the first rank.
        count = self.count
        return self.members.me == 0 and all(
            self.words[page] >= count or self._arrives_soon(page) for _, page, _ in self._others
        )

    def publish_count(self) -> None:
        """Publishes this rank's count; only the first rank waits for the others."""
        self.words[self._mine] = self.count

    def all_arrived(self) -> bool:
        """Whether all members have arrived as often as this one."""
        return all(self.words[page] >= self.count for _, page, _ in self._others)

    def blocks_as(self, dtype: np.dtype[Any], count: int, turn: int) -> list[Array]:
        """Every member's block of one turn: its first ``count`` elements as ``dtype``."""
        nbytes = count * dtype.itemsize
        return [pair[turn][:nbytes].view(dtype) for pair in self.blocks]

    def sizes(self, call: Call) -> list[int]:
        return [self.words[head + OFFER_AT // 8] for head in self._heads[call.number & 1]]

    def compared(self, call: Call) -> tuple[bool, float, int]:
        """Whether all members make the same call, when the last one arrived, and its rank."""
        heads = self._heads[call.number & 1]
        same = all(self.words[head] == call.packed.fingerprint for head in heads)
        last, me = max((self.times[head + 1], index) for index, head in enumerate(heads))
        return same, last, self.members.ranks[me]


class LeaderBuffer:
    """Memory that a host's first rank, its leader, writes for the others: results of all hosts."""

    def __init__(self, memory: mmap.mmap, here: int, members: int) -> None:
        start, slot = rounded(HostChannel.nbytes(here)), HostChannel.block_bytes(here)
        self.words = memoryview(memory).cast("Q")[start // 8 : (start + _BUFFER_HEAD) // 8]
        self.times = memoryview(memory).cast("d")[start // 8 : (start + _BUFFER_HEAD) // 8]
        self.offers = np.frombuffer(memory, np.int64, members, start + _BUFFER_HEAD)
        """The bytes that each member offers, host by host; `offered` is the same memory."""
        self.offered = memoryview(memory)[start + _BUFFER_HEAD : start + _BUFFER_HEAD + 8 * members]
        at = start + rounded(_BUFFER_HEAD + 8 * members)
        self.text = np.frombuffer(memory, np.uint8, TEXT_MOST, at)
        at += TEXT_MOST
        self.slots = [np.frombuffer(memory, np.uint8, slot, at + turn * slot) for turn in (0, 1)]

    def agreed_soon(self, number: int, own: RankState) -> bool:
        """Whether a call is agreed on within microseconds."""
        tries = 0
        while self.words[AGREED] < number:
            tries += 1
            if own.pending or tries > YIELDS:
                return False
            yield_core()
        fence()
        return True


def group_nbytes(hosts: int, here: int, members: int) -> int:
    """Bytes of memory of a group: its hosts, its members on this host, all of its members."""
    if hosts == 1:
        return rounded(Channel.nbytes(here))
    buffer = rounded(_BUFFER_HEAD + 8 * members) + TEXT_MOST + 2 * HostChannel.block_bytes(here)
    return rounded(HostChannel.nbytes(here)) + buffer
