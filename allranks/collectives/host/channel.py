"""The shared memory of one group of ranks of one host: they agree in it, and data goes through it.

Each member owns a page of numbers (how often it has arrived, what it brought) and two blocks
for data. A rank may overwrite what it wrote two arrivals ago: everybody has arrived once since,
and so has read it.
"""

from __future__ import annotations

import mmap
import struct

import numpy as np

from allranks.collectives.calls import guard
from allranks.collectives.calls.call import EPOCH_SHIFT, Call, Members, Offer
from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.guard import Packed, Spec
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.wait import Steps, yield_core
from allranks.collectives.host.memory import ORDERED, fence
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
    """`Agreement` of ranks that share memory, and the blocks through which their data goes."""

    most_block_bytes, most_bytes = 256 << 10, 32 << 20
    """Of a block as much as stays in the caches, and of all of them."""

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
        """For each turn the spec, the line and the offer that lie there."""
        self.block = self.block_bytes(members.size)
        data = np.frombuffer(memory, np.uint8, 2 * members.size * self.block, members.size * PAGE)
        self.blocks = [list(pair) for pair in data.reshape(members.size, 2, self.block)]
        self.renew()

    @classmethod
    def block_bytes(cls, members: int) -> int:
        """Bytes of one block: less where many share the memory."""
        share = cls.most_bytes // (2 * members) // PAGE * PAGE
        return min(cls.most_block_bytes, max(16 << 10, share))

    @classmethod
    def nbytes(cls, members: int) -> int:
        """Bytes that a channel for so many members needs."""
        return members * (PAGE + 2 * cls.block_bytes(members))

    def renew(self) -> None:
        """A new epoch has begun: every member starts counting anew before any arrives again."""
        self.count = self.number = self.own.epoch << EPOCH_SHIFT
        self.turn = 0
        """Which of its blocks each member filled last; the same on all. A call takes its turn once
        it is posted: a rank that has left a call before that has taken none."""

    def come(self, call: Call, offer: Offer) -> bool:
        """Lays out what this rank brings; True where all have come, and agree, within moments."""
        number = self.number + 1
        turn = number & 1
        packed, site, offered = self._laid_out[turn]
        if call.packed is not packed or call.site is not site or offer is not offered:
            self._lay_out(turn, call, offer)
        self.times[self._heads[turn][self.members.me] + 1] = call.started
        if not ORDERED:
            fence()
        # Nothing is called until it counts, so that no interrupt comes in between.
        self.number = call.number = number
        call.posted = True
        count = self.count = self.count + 1
        self.words[self._mine] = count
        return self._agree(call)

    def _lay_out(self, turn: int, call: Call, offer: Offer) -> None:
        head = self._heads[turn][self.members.me]
        start = 8 * head
        before = self._laid_out[turn]
        self._laid_out[turn] = _NOTHING  # until all of it lies there: an interrupt may come
        nbytes, place, copied, answered = offer
        _OFFER.pack_into(self.memory, start + OFFER_AT, nbytes, *place, copied, answered)
        if call.packed is not before[0] or call.site is not before[1]:
            self.words[head] = call.packed.fingerprint
            if self.own.checks:
                text = guard.pack_text(call.packed.text, call.site)[:TEXT_BYTES]
                self.memory[start + _TEXT_AT : start + _TEXT_AT + len(text)] = text
        self._laid_out[turn] = call.packed, call.site, offer

    def agree(self, call: Call, offer: Offer) -> Steps[None]:
        """As `Agreement.agree`: ends when every member has arrived with the same fingerprint."""
        yield from self.wait(call)
        self._agree(call)

    def _agree(self, call: Call) -> bool:
        """Looks at what the others have brought; False where one of them is not there yet."""
        count, words, times = self.count, self.words, self.times
        fingerprint, turn = call.packed.fingerprint, call.number & 1
        same, last, last_rank = True, call.started, self.members.rank
        for rank, page, heads in self._others:
            if words[page] < count and not self._comes(page):
                return False
            head = heads[turn]
            if words[head] != fingerprint:
                same = False
            arrived = times[head + 1]
            if arrived > last:
                last, last_rank = arrived, rank
        if not same and self.own.checks:
            self._look_closer(call)
        call.last, call.last_rank = last, last_rank
        return True

    def _look_closer(self, call: Call) -> None:
        """Raises unless those that differ have joined."""
        brought = self.brought(call)
        specs = {spec for spec, _ in brought.values()} - {guard.JOIN}
        # Not by these texts alone, as they may be cut.
        prints = {self.words[head] for head in self._heads[call.number & 1]}
        others = prints - {guard.pack(guard.JOIN).fingerprint}
        if len(others) > 1 or not guard.goes_with_joined(*specs):
            # Some have laid out a block, some have not: all go on from the same one.
            self.turn = self.count & 1
            raise CollectiveMismatch(guard.mismatch_text(brought))

    def _comes(self, page: int) -> bool:
        """Whether a member arrives as often as this one within as many moments as may be spent."""
        own, words, count = self.own, self.words, self.count
        # While calls are under way that were posted, whoever moves them on does the waiting.
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
        """Arrives once more; True where all the others do within moments."""
        fence()
        count = self.count = self.count + 1
        self.words[self._mine] = count
        for _, page, _ in self._others:
            if self.words[page] < count and not self._comes(page):
                return False
        fence()
        return True

    def meet(self, call: Call) -> Steps[None]:
        """Arrives once more, and ends when every member has."""
        if not self.arrive():
            yield from self.wait(call)

    def offered(self, call: Call) -> list[bytes]:
        """The same as `offers`, as it lies there."""
        memory = self.memory
        return [memory[where] for where in self._offers_at[call.number & 1]]

    def offers(self, call: Call) -> list[Offer]:
        """What each member has offered: it lies there until this rank comes to the next call."""
        found = []
        for told in self.offered(call):
            nbytes, segments, source, out, copied, answered = _OFFER.unpack(told)
            found.append(Offer(nbytes, (segments, source, out), bool(copied), answered))
        return found

    def brought(self, call: Call) -> dict[int, tuple[Spec, Site]]:
        """What every member has laid out for a call, and from which line."""
        texts = map(guard.unpack_text, self.texts(call))
        return dict(zip(self.members.ranks, texts, strict=True))

    def texts(self, call: Call) -> list[bytes]:
        """The same, as it lies there."""
        starts = [8 * head + _TEXT_AT for head in self._heads[call.number & 1]]
        return [self.memory[start : start + TEXT_BYTES] for start in starts]

    def missing(self, call: Call) -> tuple[int, ...]:
        """The ranks that have arrived less often than this one."""
        return self._behind(0, self.count)

    def unfinished(self, call: Call) -> tuple[int, ...]:
        """The ranks that have not said that they have done their part of a call."""
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
