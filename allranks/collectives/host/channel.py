"""The shared memory in which the members of a group on one host agree on a call and exchange data.

Each member owns a page of counters (how often it has arrived, what its call is) and two blocks for
data. A rank may overwrite what it wrote two arrivals ago: every other rank has arrived once since,
and so has read it.

Where a group is on several hosts, its members on one host share a `HostChannel` and a
`LeaderBuffer`, in which the host's first rank writes what it received from the other hosts.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np

from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls import guard
from allranks.collectives.calls.call import EPOCH_SHIFT, Call, Members, Offer
from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.guard import Packed, Spec
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.wait import Steps, yield_core
from allranks.collectives.host.memory import ORDERED, fence, rounded
from allranks.errors import CollectiveMismatch

PAGE = 4096
_WORDS = PAGE // 8
_DONE = 8
_HEAD = struct.Struct("=Qd")
_OFFER = struct.Struct("=QQQQQQ")
OFFER_AT, _TEXT_AT = _HEAD.size, _HEAD.size + _OFFER.size
_TURN = 512, 512 + 1792
TEXT_BYTES = 1792 - _TEXT_AT

YIELDS = 200

_NOTHING: tuple[Packed | None, Site | None, Offer | None] = (None, None, None)


class Channel:
    """`Agreement` of ranks that share memory, and the blocks through which their data passes."""

    most_block_bytes, most_bytes = 256 << 10, 32 << 20
    """The largest block, which stays in the caches, and the most memory for all blocks."""

    def __init__(self, own: Standing, members: Members, memory: mmap.mmap) -> None:
        self.own, self.members, self.memory = own, members, memory
        self.words = memoryview(memory).cast("Q")
        self.times = memoryview(memory).cast("d")
        self._pages = [index * _WORDS for index in range(members.size)]
        self._mine = self._pages[members.me]
        self._heads = [[page + start // 8 for page in self._pages] for start in _TURN]
        self._others = [
            (rank, page, heads)
            for rank, page, *heads in zip(members.ranks, self._pages, *self._heads, strict=True)
            if rank != members.rank
        ]
        starts = [[8 * head + OFFER_AT for head in heads] for heads in self._heads]
        self._offers_at = [[slice(at, at + _OFFER.size) for at in turn] for turn in starts]
        self._laid_out = [_NOTHING, _NOTHING]
        """For each turn the spec, the line and the offer that are written there now."""
        self.block = self.block_bytes(members.size)
        data = np.frombuffer(memory, np.uint8, 2 * members.size * self.block, members.size * PAGE)
        self.blocks = [list(pair) for pair in data.reshape(members.size, 2, self.block)]
        self.renew()

    @classmethod
    def block_bytes(cls, members: int) -> int:
        """Bytes of one block: fewer where many ranks share the memory."""
        share = cls.most_bytes // (2 * members) // PAGE * PAGE
        return min(cls.most_block_bytes, max(16 << 10, share))

    @classmethod
    def nbytes(cls, members: int) -> int:
        """Bytes that a channel for this number of members needs."""
        return members * (PAGE + 2 * cls.block_bytes(members))

    def renew(self) -> None:
        """Begins a new epoch: every member starts counting again before any of them arrives."""
        self.count = self.number = self.own.epoch << EPOCH_SHIFT
        self.turn = 0
        """Which of its two blocks each member filled last; the same on all. A call takes its turn
        when it is posted: a rank that left a call before that has taken none."""

    def come(self, call: Call, offer: Offer) -> bool:
        """Writes down this rank's call; True if all arrive and agree within microseconds."""
        number = self.number + 1
        turn = number & 1
        packed, site, offered = self._laid_out[turn]
        if call.packed is not packed or call.site is not site or offer is not offered:
            self._lay_out(turn, call, offer)
        self.times[self._heads[turn][self.members.me] + 1] = call.started
        if not ORDERED:
            fence()
        # No function call until the count is set, so that no interrupt comes in between.
        self.number = call.number = number
        call.posted = True
        count = self.count = self.count + 1
        self.words[self._mine] = count
        return self._agree(call)

    def _lay_out(self, turn: int, call: Call, offer: Offer) -> None:
        head = self._heads[turn][self.members.me]
        start = 8 * head
        before = self._laid_out[turn]
        self._laid_out[turn] = _NOTHING  # until all of it is written: an interrupt may come
        nbytes, place, copied, answered = offer
        _OFFER.pack_into(self.memory, start + OFFER_AT, nbytes, *place, copied, answered)
        if call.packed is not before[0] or call.site is not before[1]:
            self.words[head] = call.packed.fingerprint
            if self.own.checks:
                text = guard.pack_text(call.packed.text, call.site)[:TEXT_BYTES]
                self.memory[start + _TEXT_AT : start + _TEXT_AT + len(text)] = text
        self._laid_out[turn] = call.packed, call.site, offer

    def agree(self, call: Call, offer: Offer) -> Steps[None]:
        """Ends when every member has arrived with the same fingerprint."""
        yield from self.wait(call)
        self._agree(call)

    def _agree(self, call: Call) -> bool:
        """Compares the members' calls; False while one of them has not arrived."""
        count, words, times = self.count, self.words, self.times
        fingerprint, turn = call.packed.fingerprint, call.number & 1
        same, last, last_rank = True, call.started, self.members.rank
        for rank, page, heads in self._others:
            if words[page] < count and not self._arrives_soon(page):
                return False
            head = heads[turn]
            if words[head] != fingerprint:
                same = False
            arrived = times[head + 1]
            if arrived > last:
                last, last_rank = arrived, rank
        if not same and self.own.checks:
            self._check_mismatch(call)
        call.last, call.last_rank = last, last_rank
        return True

    def _check_mismatch(self, call: Call) -> None:
        """Raises `CollectiveMismatch`, unless the calls that differ are those of `join`."""
        brought = self.brought(call)
        specs = {spec for spec, _ in brought.values()} - {guard.JOIN}
        # The texts alone do not decide, as they may be cut.
        prints = {self.words[head] for head in self._heads[call.number & 1]}
        others = prints - {guard.pack(guard.JOIN).fingerprint}
        if len(others) > 1 or not guard.goes_with_joined(*specs):
            # Some members have filled a block, some have not: all go on from the same one.
            self.turn = self.count & 1
            raise CollectiveMismatch(guard.mismatch_text(brought))

    def _arrives_soon(self, page: int) -> bool:
        """Whether a member arrives as often as this one while this rank may spin."""
        own, words, count = self.own, self.words, self.count
        # While posted calls are under way, the loop that drives them does the waiting.
        spins = -1 if own.pending else own.spins
        tries = 0
        while words[page] < count:
            tries += 1
            if tries > spins:
                if spins < 0 or tries > spins + YIELDS:
                    return False
                yield_core()
        if not ORDERED:
            fence()
        return True

    def wait(self, call: Call) -> Steps[None]:
        """Ends when every member has arrived as often as this one."""
        call.stage = self.count
        for _, page, _ in self._others:
            while self.words[page] < self.count:
                yield call
        fence()

    def arrive(self) -> bool:
        """Arrives once more; True if all the others do within microseconds."""
        fence()
        count = self.count = self.count + 1
        self.words[self._mine] = count
        for _, page, _ in self._others:
            if self.words[page] < count and not self._arrives_soon(page):
                return False
        fence()
        return True

    def meet(self, call: Call) -> Steps[None]:
        """Arrives once more, and ends when every member has."""
        if not self.arrive():
            yield from self.wait(call)

    def offered(self, call: Call) -> list[bytes]:
        """The packed form of `offers`, as it is in the memory."""
        memory = self.memory
        return [memory[where] for where in self._offers_at[call.number & 1]]

    def offers(self, call: Call) -> list[Offer]:
        """What each member has offered, until this rank arrives at the next call."""
        found = []
        for packed in self.offered(call):
            nbytes, segments, source, out, copied, answered = _OFFER.unpack(packed)
            found.append(Offer(nbytes, (segments, source, out), bool(copied), answered))
        return found

    def brought(self, call: Call) -> dict[int, tuple[Spec, Site]]:
        """What every member has called, and from which line."""
        texts = map(guard.unpack_text, self.texts(call))
        return dict(zip(self.members.ranks, texts, strict=True))

    def texts(self, call: Call) -> list[bytes]:
        """The packed form of `brought`, as it is in the memory."""
        starts = [8 * head + _TEXT_AT for head in self._heads[call.number & 1]]
        return [self.memory[start : start + TEXT_BYTES] for start in starts]

    def missing(self, call: Call) -> tuple[int, ...]:
        """The ranks that have arrived less often than this one."""
        return self._behind(0, self.count)

    def unfinished(self, call: Call) -> tuple[int, ...]:
        """The ranks that have not marked their part of a call as done."""
        return () if call.transport == "shared" else self._behind(_DONE, call.number)

    def _behind(self, word: int, count: int) -> tuple[int, ...]:
        pages = zip(self.members.ranks, self._pages, strict=True)
        return tuple(
            rank for rank, page in pages if self.words[page + word] < count and page != self._mine
        )

    def sites(self, call: Call) -> dict[int, Site]:
        """Where each member that has arrived called from."""
        if not self.own.checks or not call.posted:
            return {self.own.rank: call.site}
        missing = self.missing(call)
        return {rank: site for rank, (_, site) in self.brought(call).items() if rank not in missing}

    def finish(self, call: Call) -> None:
        """Notes that this rank has done its part of a call."""
        self.words[self._mine + _DONE] = call.number


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

    def _agree(self, call: Call) -> bool:
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
        """How many bytes each member offers."""
        return [self.words[head + OFFER_AT // 8] for head in self._heads[call.number & 1]]

    def compared(self, call: Call) -> tuple[bool, float, int]:
        """Whether all members make the same call, when the last one arrived, and its rank."""
        heads = self._heads[call.number & 1]
        same = all(self.words[head] == call.packed.fingerprint for head in heads)
        last, me = max((self.times[head + 1], index) for index, head in enumerate(heads))
        return same, last, self.members.ranks[me]


class LeaderBuffer:
    """What a host's first rank, its leader, writes for the others: results of all hosts."""

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

    def agreed_soon(self, number: int, own: Standing) -> bool:
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
