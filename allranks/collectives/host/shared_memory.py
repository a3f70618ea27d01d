"""The transport of one host: its ranks agree, and move data, through memory that they share.

Each member of a group has a page of counters (its arrivals, its call) and two blocks for data. A
rank may overwrite what it wrote two arrivals ago: every other rank has arrived once since then, so
it has read it.

Large arrays are reduced in place: each member reduces its slice over all members' windows and
writes the result to all of them, so the memory is read once and written once. Of an array outside
the window a member copies what others reduce, chunk by chunk, into the result, and reads its own
slice where it is; a chunk is reduced while it is in the caches. Where the result is outside too,
the chunks pass through staging buffers (`staging.py`).

All other data streams through the blocks, which stay in the caches: each member writes a block,
arrives, and reads its part of the other members' blocks while the next ones are filled. The first
block is written before the ranks agree, so it can be read as soon as they have agreed.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls import mismatches, specs
from allranks.collectives.calls.call import (
    NOTHING,
    NOWHERE,
    Call,
    Members,
    Move,
    Offer,
    Prepared,
    Steps,
    prepared,
    yield_core,
)
from allranks.collectives.calls.rank_state import EPOCH_SHIFT, RankState
from allranks.collectives.calls.sites import Site
from allranks.collectives.calls.specs import Packed, Spec
from allranks.collectives.host import futex
from allranks.collectives.host.memory import ORDERED, WARM_BYTES, Window, fence, is_in_window, place
from allranks.collectives.host.slices import Slices
from allranks.collectives.host.staging import BLOCK_BYTES, Halves, StagingBuffer, split
from allranks.errors import CollectiveMismatch

PAGE = 4096
_WORDS = PAGE // 8
# A member's page: its arrivals in word 0; on cache lines of their own, the last call that it has
# done and whether a rank sleeps until it arrives; and two calls, as a rank may write its next one
# while others still read this one.
_DONE, _AWAITED = 8, 16
_HEAD = struct.Struct("=Qd")
_OFFER = struct.Struct("=QQQQQQ")
OFFER_AT, _TEXT_AT = _HEAD.size, _HEAD.size + _OFFER.size
_PLACE = OFFER_AT // 8 + 1
"""The word of a call with the segments of its place; 0 where that is nowhere."""
_TURN = 512, 512 + 1792
TEXT_BYTES = 1792 - _TEXT_AT

_YIELDS, _SLEEPS, _SLEEP_SECONDS = 2, 4, 5e-4
"""Polls after spinning: some that yield the core to another rank, and sleeps that the awaited rank
ends. Then the call continues as steps. More yields would give the core to other programs, each time
for milliseconds."""
_NOTHING: tuple[Packed | None, Site | None, Offer | None] = (None, None, None)


class Channel:
    """`Agreement` of ranks that share memory, and the blocks for their data."""

    most_block_bytes, most_bytes = 256 << 10, 32 << 20
    """The largest block, which stays in the caches, and the most memory for all blocks."""

    def __init__(self, own: RankState, members: Members, memory: mmap.mmap) -> None:
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
        start = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        self._addresses = {page: start + 8 * page for page in self._pages}
        self._laid_out = [_NOTHING, _NOTHING]
        """The spec, the line and the offer that are written for each turn."""
        self.block = self.block_bytes(members.size)
        data = np.frombuffer(memory, np.uint8, 2 * members.size * self.block, members.size * PAGE)
        self.blocks = [list(pair) for pair in data.reshape(members.size, 2, self.block)]
        self.renew()

    @classmethod
    def block_bytes(cls, members: int) -> int:
        """Bytes of one block: fewer if many ranks share the memory."""
        share = cls.most_bytes // (2 * members) // PAGE * PAGE
        return min(cls.most_block_bytes, max(16 << 10, share))

    @classmethod
    def nbytes(cls, members: int) -> int:
        return members * (PAGE + 2 * cls.block_bytes(members))

    def renew(self) -> None:
        """Begins a new epoch: every member starts counting again before any of them arrives."""
        self.count = self.number = self.own.epoch << EPOCH_SHIFT
        self.turn = 0
        """Which of its two blocks each member filled last; the same on all. A call takes its turn
        when it is posted: a rank that left a call before that has taken none. Reductions by slices
        take none."""

    def arrive(self, call: Call, offer: Offer) -> bool:
        number = self.number + 1
        turn = number & 1
        packed, site, offered = self._laid_out[turn]
        # In a loop these are the same objects as before: then the memory holds them already.
        if call.packed is not packed or call.site is not site or offer is not offered:
            self._lay_out(turn, call, offer)
        self.times[self._heads[turn][self.members.me] + 1] = call.started
        if not ORDERED:
            fence()
        # No function call until the count is set: an interrupt would come in between.
        self.number = call.number = number
        call.posted = True
        count = self.count = self.count + 1
        self.words[self._mine] = count
        # A system call only if a rank sleeps: most calls of small data meet none.
        if self.words[self._mine + _AWAITED]:
            self.wake_waiting()
        return self._compare(call)

    def wake_waiting(self) -> None:
        """Wakes the ranks that sleep until this one arrives, after it has."""
        self.words[self._mine + _AWAITED] = 0
        futex.wake(self._addresses[self._mine])

    def _sleep(self, page: int, seconds: float) -> None:
        """Sleeps until a member arrives, for at most these seconds."""
        self.words[page + _AWAITED] = 1
        count = self.words[page]
        # The member may have read the word above before it was set: then it wakes no rank.
        if count < self.count:
            futex.wait(self._addresses[page], count, seconds)

    def _lay_out(self, turn: int, call: Call, offer: Offer) -> None:
        head = self._heads[turn][self.members.me]
        start = 8 * head
        before = self._laid_out[turn]
        self._laid_out[turn] = _NOTHING  # an interrupt may leave it half written
        nbytes, place, copied, answered = offer
        _OFFER.pack_into(self.memory, start + OFFER_AT, nbytes, *place, copied, answered)
        if call.packed is not before[0] or call.site is not before[1]:
            self.words[head] = call.packed.fingerprint
            if self.own.checks:
                text = specs.pack_text(call.packed.text, call.site)[:TEXT_BYTES]
                self.memory[start + _TEXT_AT : start + _TEXT_AT + len(text)] = text
        self._laid_out[turn] = call.packed, call.site, offer

    def wait(self, call: Call, offer: Offer) -> Steps[None]:
        yield from self.wait_for_all(call)
        self._compare(call)

    def _compare(self, call: Call) -> bool:
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
        join = specs.JOIN._replace(client=call.spec.client)
        different = {spec for spec, _ in brought.values()} - {join}
        # The texts may be cut, so fingerprints decide.
        prints = {self.words[head] for head in self._heads[call.number & 1]}
        others = prints - {specs.pack(join).fingerprint}
        apart = any(spec.client != join.client for spec in different)
        if apart or len(others) > 1 or not specs.goes_with_joined(*different):
            # Only some members have filled a block: all continue from the same turn.
            self.turn = self.count & 1
            raise CollectiveMismatch(mismatches.mismatch_text(brought))

    def _arrives_soon(self, page: int) -> bool:
        """Whether a member arrives as often as this one within the spin time."""
        own, words, count = self.own, self.words, self.count
        # While posted calls are under way, the loop that drives them waits.
        spins = -1 if own.pending else own.spins
        tries = 0
        while words[page] < count:
            tries += 1
            if tries > spins:
                if spins < 0 or tries > spins + _YIELDS + _SLEEPS:
                    return False
                if tries > spins + _YIELDS:
                    self._sleep(page, _SLEEP_SECONDS)
                else:
                    yield_core()
        if not ORDERED:
            fence()
        return True

    def wait_for_all(self, call: Call) -> Steps[None]:
        call.stage = self.count
        for _, page, _ in self._others:
            if self.words[page] < self.count:
                call.sleep = partial(self._sleep, page)
                while self.words[page] < self.count:
                    yield call
        call.sleep = None
        fence()

    def try_barrier(self) -> bool:
        """Arrives once more; True if all others do within microseconds."""
        fence()
        count = self.count = self.count + 1
        self.words[self._mine] = count
        if self.words[self._mine + _AWAITED]:
            self.wake_waiting()
        for _, page, _ in self._others:
            if self.words[page] < count and not self._arrives_soon(page):
                return False
        fence()
        return True

    def barrier(self, call: Call) -> Steps[None]:
        if not self.try_barrier():
            yield from self.wait_for_all(call)

    def has_places(self, call: Call) -> bool:
        """Whether another member has offered a place in its window."""
        words, turn, segments = self.words, call.number & 1, 0
        for _, _, heads in self._others:
            segments |= words[heads[turn] + _PLACE]
        return bool(segments)

    def offered(self, call: Call) -> list[bytes]:
        memory = self.memory
        return [memory[where] for where in self._offers_at[call.number & 1]]

    def offers(self, call: Call) -> list[Offer]:
        every = map(_OFFER.unpack, self.offered(call))
        return [Offer(nbytes, tuple(at), bool(flag), n) for nbytes, *at, flag, n in every]

    def brought(self, call: Call) -> dict[int, tuple[Spec, Site]]:
        texts = map(specs.unpack_text, self.texts(call))
        return dict(zip(self.members.ranks, texts, strict=True))

    def texts(self, call: Call) -> list[bytes]:
        starts = [8 * head + _TEXT_AT for head in self._heads[call.number & 1]]
        return [self.memory[start : start + TEXT_BYTES] for start in starts]

    def missing(self, call: Call) -> tuple[int, ...]:
        return self._behind(0, self.count)

    def unfinished(self, number: int) -> tuple[int, ...]:
        return self._behind(_DONE, number)

    def _behind(self, word: int, count: int) -> tuple[int, ...]:
        words = self.words
        return tuple([rank for rank, page, _ in self._others if words[page + word] < count])

    def sites(self, call: Call) -> dict[int, Site]:
        if not self.own.checks or not call.posted:
            return {self.own.rank: call.site}
        missing = self.missing(call)
        return {rank: site for rank, (_, site) in self.brought(call).items() if rank not in missing}

    def finish(self, call: Call) -> None:
        self.words[self._mine + _DONE] = call.number


CHUNK_BYTES = 2 << 20


class ReductionBlock(NamedTuple):
    """A part of this rank's slice: where it is, the members' inputs, and the outputs."""

    here: slice
    parts: list[Array]
    first: Array
    others: list[Array]


def _slice(
    sources: list[Array], outs: list[Array], me: int, start: int, end: int
) -> list[ReductionBlock]:
    """The blocks of ``start:end`` that this rank reduces, as views of all members' windows."""
    found = []
    low, high = _own_slice(me, len(outs), start, end)
    # The sum of the first two inputs replaces the copy that another member made of its input: a sum
    # in place takes 0.6 of the time. Later inputs may not be replaced.
    replaced = 1 if sources is outs and me == 0 and len(outs) > 1 else 0
    step = BLOCK_BYTES // outs[0].itemsize
    for at in range(low, high, step):
        here = slice(at, min(high, at + step))
        parts, others = [source[here] for source in sources], [out[here] for out in outs]
        first = others.pop(replaced)
        found.append(ReductionBlock(here, parts, first, others))
    return found


def _own_slice(me: int, members: int, start: int, end: int) -> tuple[int, int]:
    """The part of ``start:end`` that this rank reduces."""
    count = end - start
    return start + count * me // members, start + count * (me + 1) // members


def chunk(dtype: np.dtype[Any]) -> int:
    """The number of elements that are copied before they are reduced."""
    return CHUNK_BYTES // dtype.itemsize


def one_block_bytes(members: int, block: int) -> int:
    """The largest array that every member reduces as a whole, through blocks."""
    # That takes one arrival instead of two, for members − 1 times the arithmetic. Larger ones
    # are reduced by slices.
    return min(block, WARM_BYTES, CHUNK_BYTES // 2 // max(1, members - 1))


_READS_OWN_FROM = 8 << 10
"""From this many bytes a member reads its own array again, instead of its block."""
T = TypeVar("T")
OneBlock = tuple[int, Array, Callable[..., Array]]
"""Bytes, this rank's block of one turn, and the function that makes the result of all blocks."""
InPlace = tuple[bool, list[list[ReductionBlock]] | None, Halves | None]
"""Whether only some members copy, for each chunk the blocks that this rank reduces, or None if an
array is outside a window, and the staging buffers if all outputs are."""
_KEPT = 1024
"""The number of cached views of the shared memory: it takes longer to make one than to use it."""
_SLICE_FROM = 4
"""From this many members each reduces only its slice; for fewer, one arrival less is faster."""


class SharedMemoryTransport:
    """`Transport` over one channel, and over the members' windows, if they have some."""

    name = "shared"
    exact = True

    def __init__(self, channel: Channel, window: Window | None) -> None:
        self.members, self.channel, self.window = channel.members, channel, window
        self._staging = StagingBuffer(channel, window)
        self._one_block_bytes = one_block_bytes(self.members.size, channel.block)
        self._one_block: tuple[dict[Arithmetic, OneBlock], ...] = ({}, {})
        self._slices: tuple[dict[Arithmetic, Slices], ...] = ({}, {})
        self._parts: dict[tuple[np.dtype[Any], tuple[int, ...], int], list[Array]] = {}
        self._offers: dict[tuple[object, ...], Offer] = {}
        self._places: dict[tuple[object, ...], InPlace] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array, in the window if it is large enough to profit."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > WARM_BYTES and self.window is not None:
            out = self.window.empty(shape, dtype, nbytes)
            if out is not None:
                return out
        return np.empty(shape, dtype)

    def renew(self) -> None:
        """Does nothing: this transport keeps no state of an epoch."""

    def forget_places(self) -> None:
        """Drops the views of other ranks' memory, which keep it alive."""
        self._places.clear()

    def allreduce(
        self, call: Call, source: Array, reduction: Arithmetic, out: Array | None = None
    ) -> Prepared[Array]:
        nbytes = source.nbytes
        if nbytes <= self._one_block_bytes:
            turn = self.channel.turn ^ 1
            known = self._one_block[turn].get(reduction)
            if known is None or known[0] != nbytes:
                known = self._begin_one_block(source, reduction, turn)
            _, block, rest = known
            if not reduction.copies:
                reduction.staged(source, block)
            else:
                block[...] = source
                # The block has left this core's nearest cache if another member has read it. The
                # array is as good, if the result does not replace it before it is read.
                reads_own = nbytes >= _READS_OWN_FROM and source.flags.c_contiguous
                if reads_own and (out is not source or self.members.me < 2):
                    return NOTHING, partial(rest, out, source)
            return NOTHING, rest if out is None else partial(rest, out)
        window = None if call.posted else self.window
        source_at = 0, 0
        if window is not None and source.flags.c_contiguous:  # else `reshape` copies its values
            source_at = window.place_of(source)
        is_small = nbytes <= self.channel.block and self.members.size > 1
        if is_small and not source_at[0]:
            return NOTHING, self._by_slices(call, source, reduction, out)
        found = self.empty(source.shape, source.dtype) if out is None else out
        at = window.place_of(found) if window is not None else (0, 0)
        if is_small and not at[0]:
            return NOTHING, self._by_slices(call, source, reduction, found)
        if source is out and not reduction.copies:
            source = source.copy()  # scaled values are written to ``out`` before it is read again
        source = source.reshape(-1)
        if window is None:
            turn = self._stage(source[: self._step(source)], reduction)
            return NOTHING, self._through_blocks(source, found, reduction, call, turn)
        copied = not source_at[0] or not reduction.plain
        call.held = source, found
        where = NOWHERE
        if at[0]:
            where = place(at if copied else source_at, at)
            if copied:
                self._copy_chunk(0, source, found.reshape(-1), reduction)
        elif nbytes > self.channel.block:
            where = self._staging.stage(0, source, reduction)
        key = where, copied
        offer = self._offers.get(key) or keep(self._offers, key, Offer(0, where, copied))
        return offer, self.reduce_in_place(call, None, source, found, reduction, copied=copied)

    def _begin_one_block(self, source: Array, reduction: Arithmetic, turn: int) -> OneBlock:
        """An array of at most one block needs only the arrival at which all agree."""
        channel, me = self.channel, self.members.me
        blocks = self._blocks(source.dtype, source.shape, turn)
        of_two = reduction.bare and len(blocks) == 2 and source.ndim
        sum_of_two = reduction.ufunc if of_two else None

        def rest(out: Array | None = None, own: Array | None = None) -> Array:
            channel.turn = turn
            parts = blocks if own is None else [*blocks[:me], own, *blocks[me + 1 :]]
            if sum_of_two and out is None:
                return sum_of_two(*parts)  # type: ignore[no-any-return]
            return reduction.combine(parts, out)

        known = source.nbytes, blocks[me], rest
        return keep(self._one_block[turn], reduction, known)

    def _by_slices(
        self, call: Call, source: Array, reduction: Arithmetic, out: Array | None
    ) -> Steps[Array]:
        """Publishes this rank's values, and returns the steps that reduce them."""
        slices = self._slices_for(reduction, source.size)
        slices.stage(source.reshape(-1), reduction)
        return self._reduce_slices(call, source, reduction, out, slices, later=call.posted)

    def _slices_for(self, reduction: Arithmetic, size: int) -> Slices:
        turn = self.channel.turn ^ 1
        known = self._slices[turn].get(reduction)
        if known is not None and known.size == size:
            return known
        blocks = self._blocks(reduction.dtype, (size,), turn)
        bounds = _own_slice(self.members.me, self.members.size, 0, size)
        return keep(self._slices[turn], reduction, Slices.of(blocks, self.members.me, bounds))

    def _reduce_slices(
        self,
        call: Call,
        source: Array,
        reduction: Arithmetic,
        out: Array | None,
        slices: Slices,
        *,
        later: bool = False,
    ) -> Steps[Array]:
        """``later`` is True for a move that is not the first of its call."""
        channel = self.channel
        if out is None:
            out = np.empty(source.shape, source.dtype)
        given, into = source.reshape(-1), out.reshape(-1)
        if not later and channel.has_places(call):
            # Members with arrays in their windows have published nothing in their blocks.
            return (yield from self._through_blocks(given, out, reduction, call))
        slices.reduce(given, into, reduction)
        if not channel.try_barrier():
            yield from channel.wait_for_all(call)
        slices.take(into)
        return out

    def contribute_zeros(self, call: Call, zeros: Array, reduction: Arithmetic) -> Steps[None]:
        """This rank's part of an allreduce of the others, at which it has arrived with zeros in its
        whole block.
        """
        if zeros.nbytes <= self._one_block_bytes:
            self.channel.turn ^= 1
            return
        if zeros.nbytes <= self.channel.block:
            slices = self._slices_for(reduction, zeros.size)
            yield from self._reduce_slices(call, zeros, reduction, None, slices)
        else:
            # These zeros are in no window, so the other ranks reduce through blocks too.
            yield from self._through_blocks(zeros, np.empty_like(zeros), reduction, call)

    def reduce_in_place(
        self,
        call: Call,
        offers: list[Offer] | None,
        source: Array,
        out: Array,
        reduction: Arithmetic,
        *,
        copied: bool,
    ) -> Steps[Array]:
        """Reduces in place, if all arrays are in a window. All members have agreed. If ``offers``
        is None, they are those of the agreement.
        """
        known = offers or self.channel.offered(call)
        key = reduction, source.size, copied, *known
        mixed, todo, halves = self._places.get(key) or self._find_places(call, offers, key)
        if halves is not None:
            yield from self._staging.reduce(call, source, out.reshape(-1), reduction, halves)
            return out
        if todo is None:
            return (yield from self._through_blocks(source, out, reduction, call))
        channel, step, flat = self.channel, chunk(reduction.dtype), out.reshape(-1)
        me = self.members.me
        if mixed:
            # Only some members have copied their first chunk.
            if not copied:
                self._copy_chunk(0, source, flat, reduction)
            copied = True
            yield from channel.barrier(call)
        for index, found in enumerate(todo):
            if index and copied:
                self._copy_chunk(index * step, source, flat, reduction)
                yield from channel.barrier(call)
            for here, parts, first, others in found:
                if copied and reduction.copies:
                    # A new list: the kept one must not keep the caller's array alive.
                    parts = [*parts[:me], source[here], *parts[me + 1 :]]
                reduction.combine(parts, first)
                for other in others:
                    other[...] = first
        # Until they arrive again, other members write their parts of ``out``.
        if not channel.try_barrier():
            yield from channel.wait_for_all(call)
        return out

    def _copy_chunk(self, start: int, source: Array, out: Array, reduction: Arithmetic) -> None:
        """Writes a chunk of this rank's values to its output, for the other members."""
        end = min(source.size, start + chunk(source.dtype))
        if not reduction.copies:
            reduction.staged(source[start:end], out[start:end])
            return
        low, high = _own_slice(self.members.me, self.members.size, start, end)
        if start < low:
            np.copyto(out[start:low], source[start:low])
        if high < end:
            np.copyto(out[high:end], source[high:end])

    def _find_places(self, call: Call, offers: list[Offer] | None, key: tuple[Any, ...]) -> InPlace:
        reduction, size, copied, *_ = key
        offers, dtype, window = offers or self.channel.offers(call), reduction.dtype, self.window
        # No generators: Python drops an interrupt that comes while it ends one.
        mixed, todo = {offer.copied for offer in offers} != {copied}, None
        places = [offer.place for offer in offers]
        halves = self._staging.halves(places, dtype)
        if window is not None and all(map(is_in_window, places)):
            copied, nbytes = copied or mixed, size * dtype.itemsize
            sources, outs = [], []
            for rank, offer in zip(self.members.ranks, offers, strict=True):
                segments, source, out = offer.place
                # Plain arrays: numpy takes longer for a `Region`.
                outs.append(window.at(rank, segments >> 16, out, nbytes).view(dtype, np.ndarray))
                if not copied:
                    at = window.at(rank, segments & 0xFFFF, source, nbytes)
                    sources.append(at.view(dtype, np.ndarray))
            step = chunk(dtype) if copied else max(1, size)
            todo = [
                _slice(sources or outs, outs, self.members.me, start, min(size, start + step))
                for start in range(0, size, step)
            ]
        return keep(self._places, key, (mixed, todo, halves))

    def _through_blocks(
        self, source: Array, out: Array, reduction: Arithmetic, call: Call, turn: int | None = None
    ) -> Steps[Array]:
        channel, step, flat = self.channel, self._step(source), out.reshape(-1)
        by_slice = source.nbytes > self._one_block_bytes and self.members.size >= _SLICE_FROM
        for start in range(0, max(1, source.size), step):
            part, into = source[start : start + step], flat[start : start + step]
            # The first block may have been filled before the agreement.
            if start or turn is None:
                turn = self._stage(part, reduction)
                yield from channel.barrier(call)
            channel.turn = turn
            parts = self._blocks(part.dtype, part.shape, turn)
            if not by_slice:
                reduction.combine(parts, into)
                continue
            slices = [slice(*bounds) for bounds in pairwise(split(part.size, self.members.size))]
            mine = slices[self.members.me]
            reduction.combine([p[mine] for p in parts], into[mine])
            np.copyto(parts[self.members.me][mine], into[mine])
            yield from channel.barrier(call)
            for index, theirs in enumerate(slices):
                if index != self.members.me:
                    np.copyto(into[theirs], parts[index][theirs])
        return out

    @prepared
    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, reduction: Arithmetic
    ) -> Move[None]:
        channel, step = self.channel, self._step(source)
        first, last = bounds[self.members.me], bounds[self.members.me + 1]
        for start in range(0, max(1, source.size), step):
            part = source[start : start + step]
            turn = self._stage(part, reduction)
            if start:
                yield from channel.barrier(call)
            else:
                yield Offer(source.nbytes)
            channel.turn = turn
            low, high = max(first, start), min(last, start + part.size)
            if low < high:
                here = slice(low - start, high - start)
                parts = self._blocks(part.dtype, part.shape, turn)
                reduction.combine([p[here] for p in parts], out[low - first : high - first])

    @prepared
    def broadcast(self, call: Call, array: Array, root: int) -> Move[None]:
        source = array if root == self.members.me else array[:0]

        def read(member: int, start: int, block: Array) -> None:
            if member != self.members.me:
                np.copyto(array[start : start + block.size], block)

        lengths = [array.nbytes if i == root else 0 for i in range(self.members.size)]
        turn = self._fill(source, 0)
        yield Offer(source.nbytes)
        yield from self._stream(call, source, lengths, read, turn)

    @prepared
    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Move[list[Array]]:
        turn = self._fill(source, 0)
        yield Offer(source.nbytes)
        return (yield from self._gather(call, source, lengths, root, turn))

    def _gather(
        self, call: Call, source: Array, lengths: Sequence[int] | None, root: int, turn: int
    ) -> Steps[list[Array]]:
        reads = root in (-1, self.members.me)
        sizes = lengths or [offer.nbytes for offer in call.agreement.offers(call)]
        outs: list[Array] = [np.empty(size if reads else 0, np.uint8) for size in sizes]

        def read(member: int, start: int, block: Array) -> None:
            if reads:
                np.copyto(outs[member][start : start + block.size], block)

        yield from self._stream(call, source, sizes, read, turn)
        return outs

    @prepared
    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Move[list[Array]]:
        me, members = self.members.me, self.members.size
        head = np.array(lengths, np.int64).view(np.uint8)
        turn = self._fill(head, 0)
        yield Offer(source.nbytes)
        sizes = [8 * members if root in (-1, index) else 0 for index in range(members)]
        tables = yield from self._gather(call, head, sizes, -1, turn)
        cuts = [np.concatenate([[0], np.cumsum(table.view(np.int64))]) for table in tables]
        spans = [(int(cut[me]), int(cut[me + 1])) if cut.size > me + 1 else (0, 0) for cut in cuts]
        outs: list[Array] = [np.empty(high - low, np.uint8) for low, high in spans]

        def read(member: int, start: int, block: Array) -> None:
            low, high = spans[member]
            first, last = max(low, start), min(high, start + block.size)
            if first < last:
                np.copyto(
                    outs[member][first - low : last - low], block[first - start : last - start]
                )

        yield from self._stream(call, source, [int(cut[-1]) for cut in cuts], read)
        return outs

    def _stream(
        self,
        call: Call,
        source: Array,
        lengths: Sequence[int],
        read: Callable[[int, int, Array], None],
        turn: int | None = None,
    ) -> Steps[None]:
        """Passes every member's bytes to ``read``, block by block."""
        channel = self.channel
        # One block takes its turn even if all members are empty.
        for start in range(0, max(1, *lengths), channel.block):
            if start or turn is None:
                turn = self._fill(source, start)
                yield from channel.barrier(call)
            channel.turn = turn
            for member, length in enumerate(lengths):
                size = min(channel.block, length - start)
                if size > 0:
                    read(member, start, channel.blocks[member][turn][:size])

    def _step(self, array: Array) -> int:
        return max(1, self.channel.block // array.dtype.itemsize)

    def _stage(self, part: Array, reduction: Arithmetic) -> int:
        """Fills the next block with values, and returns its turn."""
        turn = self.channel.turn ^ 1
        reduction.staged(part, self._blocks(part.dtype, part.shape, turn)[self.members.me])
        return turn

    def _blocks(self, dtype: np.dtype[Any], shape: tuple[int, ...], turn: int) -> list[Array]:
        key = dtype, shape, turn
        parts = self._parts.get(key)
        if parts is None:
            nbytes = math.prod(shape) * dtype.itemsize
            blocks = [pair[turn][:nbytes] for pair in self.channel.blocks]
            parts = keep(self._parts, key, [block.view(dtype).reshape(shape) for block in blocks])
        return parts

    def _fill(self, source: Array, start: int) -> int:
        turn = self.channel.turn ^ 1
        part = source[start : start + self.channel.block]
        np.copyto(self.channel.blocks[self.members.me][turn][: part.size], part)
        return turn


def keep(known: dict[Any, T], key: object, made: T) -> T:
    if len(known) >= _KEPT:
        known.clear()
    known[key] = made
    return made
