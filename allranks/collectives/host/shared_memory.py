"""The transport of one host: data through memory that its ranks share.

Large arrays are reduced in place: each member reduces its slice over all members' windows and
writes the result to all of them, so that the memory is read once and written once. Arrays outside
the window are copied there, chunk by chunk, into what becomes the result; a chunk is reduced while
it is in the caches.

Everything else streams through the channel's blocks, which stay in the caches: each member writes a
block, arrives, and reads what it needs of the other members' blocks while the next ones are filled.
The first block is written while a call is prepared, so that the arrival at which all agree is the
one after which it may be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import (
    NOTHING,
    NOWHERE,
    Call,
    Members,
    Move,
    Offer,
    Place,
    Prepared,
    prepared,
)
from allranks.collectives.calls.wait import Steps
from allranks.collectives.host.channel import Channel
from allranks.collectives.host.memory import WARM_BYTES, Window, place

CHUNK_BYTES = 2 << 20
BLOCK_BYTES = 256 << 10
"""What one numpy call works on, so that sums stay in the caches until they are written."""


class ReductionBlock(NamedTuple):
    """A part of this rank's slice: the inputs, its own output, the other members' outputs."""

    parts: list[Array]
    mine: Array
    others: list[Array]


def blocks(
    window: Window,
    members: Members,
    places: Sequence[Place],
    size: int,
    dtype: np.dtype[Any],
    *,
    copied: bool,
) -> list[list[ReductionBlock]]:
    """For each chunk the blocks that this rank reduces, as views of all members' windows."""
    nbytes = size * dtype.itemsize
    sources, outs = [], []
    for rank, (segments, source, out) in zip(members.ranks, places, strict=True):
        outs.append(window.at(rank, segments >> 16, out, nbytes).view(dtype))
        if not copied:
            sources.append(window.at(rank, segments & 0xFFFF, source, nbytes).view(dtype))
    step = chunk(dtype) if copied else max(1, size)
    return [
        _slice(outs if copied else sources, outs, members.me, start, min(size, start + step))
        for start in range(0, size, step)
    ]


def _slice(
    sources: list[Array], outs: list[Array], me: int, start: int, end: int
) -> list[ReductionBlock]:
    members, count, found = len(outs), end - start, []
    low, high = start + count * me // members, start + count * (me + 1) // members
    step = BLOCK_BYTES // outs[0].itemsize
    for at in range(low, high, step):
        here = slice(at, min(high, at + step))
        others = [out[here] for index, out in enumerate(outs) if index != me]
        # This rank's own input comes first: where it is the output too, the first sum replaces it.
        order = [me, *(index for index in range(len(outs)) if index != me)]
        found.append(
            ReductionBlock([sources[index][here] for index in order], outs[me][here], others)
        )
    return found


def reduce_blocks(found: list[ReductionBlock], how: Arithmetic) -> None:
    """Reduces one chunk's blocks and writes them to every member's output."""
    for parts, mine, others in found:
        how.combine(parts, mine)
        for other in others:
            other[...] = mine


def chunk(dtype: np.dtype[Any]) -> int:
    """Elements that are copied at a time before they are reduced."""
    return CHUNK_BYTES // dtype.itemsize


def one_block_bytes(members: int, block: int) -> int:
    """The largest array that every member reduces as a whole, through blocks.

    That takes one arrival instead of two, for members − 1 times the arithmetic. Larger results
    are in the windows, where every member can write them.
    """
    return min(block, WARM_BYTES, CHUNK_BYTES // 2 // max(1, members - 1))


T = TypeVar("T")
OneBlock = tuple[int, Array, Callable[..., Array]]
"""Bytes, this rank's block of one turn, and the function that makes the result of all blocks."""
InPlace = tuple[bool, list[list[ReductionBlock]] | None]
"""Whether only some members copy, and the blocks to reduce; None where an array is outside."""
_KEPT = 1024
"""Kinds of calls whose views of the shared memory are kept: they cost more to make than to use."""
_SLICE_FROM = 4
"""From this number of members on each reduces its slice only; below, one arrival less is faster."""


class SharedMemoryTransport:
    """Transport over one channel, and over the members' windows where they have some."""

    name = "shared"

    def __init__(self, channel: Channel, window: Window | None) -> None:
        self.members, self.channel, self.window = channel.members, channel, window
        self._one_block_bytes = one_block_bytes(self.members.size, channel.block)
        self._one_block: tuple[dict[Arithmetic, OneBlock], ...] = ({}, {})
        self._parts: dict[tuple[np.dtype[Any], tuple[int, ...], int], list[Array]] = {}
        self._offers: dict[tuple[object, ...], Offer] = {}
        self._places: dict[tuple[object, ...], InPlace] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array, in the window if it is large enough to gain by that."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > WARM_BYTES and self.window is not None:
            out = self.window.empty(shape, dtype, nbytes)
            if out is not None:
                return out
        return np.empty(shape, dtype)

    def renew(self) -> None:
        """Does nothing: this transport keeps no state of an epoch."""

    def allreduce(
        self, call: Call, source: Array, how: Arithmetic, out: Array | None = None
    ) -> Prepared[Array]:
        """Reduces small arrays through the blocks, and the others in place."""
        nbytes = source.nbytes
        if nbytes <= self._one_block_bytes:
            turn = self.channel.turn ^ 1
            known = self._one_block[turn].get(how)
            if known is None or known[0] != nbytes:
                known = self._begin_one_block(source, how, turn)
            _, block, rest = known
            if how.copies:
                block[...] = source
            else:
                how.staged(source, block)
            return NOTHING, rest if out is None else partial(rest, out)
        found = self.empty(source.shape, source.dtype) if out is None else out
        source = source.reshape(-1)
        window = self.window
        if window is None or call.posted:
            turn = self._stage(source[: self._step(source)], how)
            return NOTHING, self._through_blocks(source, found, how, call, turn)
        at, source_at = window.place_of(found), window.place_of(source)
        copied = not source_at[0] or not how.plain
        call.held = source, found
        if copied and at[0]:
            step = chunk(source.dtype)
            how.staged(source[:step], found.reshape(-1)[:step])
        key = source_at, at, copied
        offer = self._offers.get(key)
        if offer is None:
            offer = Offer(0, place(at if copied else source_at, at), copied)
            keep(self._offers, key, offer)
        return offer, self.reduce_in_place(call, None, source, found, how, copied=copied)

    def _begin_one_block(self, source: Array, how: Arithmetic, turn: int) -> OneBlock:
        """An array that fits in one block takes a single arrival, the one at which all agree."""
        channel = self.channel
        parts = self._blocks(source.dtype, source.shape, turn)
        sum_of_two = how.ufunc if how.bare and len(parts) == 2 and source.ndim else None

        def rest(out: Array | None = None) -> Array:
            channel.turn = turn
            if sum_of_two and out is None:
                return sum_of_two(*parts)  # type: ignore[no-any-return]
            return how.combine(parts, out)

        known = source.nbytes, parts[self.members.me], rest
        return keep(self._one_block[turn], how, known)

    def reduce_in_place(
        self,
        call: Call,
        offers: list[Offer] | None,
        source: Array,
        out: Array,
        how: Arithmetic,
        *,
        copied: bool,
    ) -> Steps[Array]:
        """Reduces in place, if all arrays are in a window; all members have agreed.

        Where ``offers`` is None they are those that the members agreed with.
        """
        known = offers or self.channel.offered(call)
        key = how, source.size, copied, *known
        mixed, todo = self._places.get(key) or self._find_places(call, offers, key)
        if todo is None:
            return (yield from self._through_blocks(source, out, how, call))
        channel, step, flat = self.channel, chunk(how.dtype), out.reshape(-1)
        if mixed:
            # Some members have copied their first chunk, and some had nothing to copy.
            if not copied:
                how.staged(source[:step], flat[:step])
            copied = True
            yield from channel.meet(call)
        for index, found in enumerate(todo):
            if index and copied:
                start = index * step
                how.staged(source[start : start + step], flat[start : start + step])
                yield from channel.meet(call)
            reduce_blocks(found, how)
        if not channel.arrive():
            yield from channel.wait(call)
        return out

    def _find_places(self, call: Call, offers: list[Offer] | None, key: tuple[Any, ...]) -> InPlace:
        how, size, copied, *_ = key
        offers = offers or self.channel.offers(call)
        places = [offer.place for offer in offers]
        mixed, todo = any(offer.copied is not copied for offer in offers), None
        if self.window is not None and NOWHERE not in places:
            todo = blocks(
                self.window, self.members, places, size, how.dtype, copied=copied or mixed
            )
        return keep(self._places, key, (mixed, todo))

    def _through_blocks(
        self, source: Array, out: Array, how: Arithmetic, call: Call, turn: int | None = None
    ) -> Steps[Array]:
        """Reduces block by block.

        ``turn`` is that of the first block, if it has been filled and all have arrived since.
        """
        channel, step, flat = self.channel, self._step(source), out.reshape(-1)
        by_slice = source.nbytes > self._one_block_bytes and self.members.size >= _SLICE_FROM
        for start in range(0, max(1, source.size), step):
            part, into = source[start : start + step], flat[start : start + step]
            if start or turn is None:
                turn = self._stage(part, how)
                yield from channel.meet(call)
            channel.turn = turn
            parts = self._blocks(part.dtype, part.shape, turn)
            if not by_slice:
                how.combine(parts, into)
                continue
            slices = [slice(*bounds) for bounds in pairwise(split(part.size, self.members.size))]
            mine = slices[self.members.me]
            how.combine([p[mine] for p in parts], into[mine])
            np.copyto(parts[self.members.me][mine], into[mine])
            yield from channel.meet(call)
            for index, theirs in enumerate(slices):
                if index != self.members.me:
                    np.copyto(into[theirs], parts[index][theirs])
        return out

    @prepared
    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, how: Arithmetic
    ) -> Move[None]:
        """Every member reduces the part of each block that is its own."""
        channel, step = self.channel, self._step(source)
        first, last = bounds[self.members.me], bounds[self.members.me + 1]
        for start in range(0, max(1, source.size), step):
            part = source[start : start + step]
            turn = self._stage(part, how)
            if start:
                yield from channel.meet(call)
            else:
                yield Offer(source.nbytes)
            channel.turn = turn
            low, high = max(first, start), min(last, start + part.size)
            if low < high:
                here = slice(low - start, high - start)
                parts = self._blocks(part.dtype, part.shape, turn)
                how.combine([p[here] for p in parts], out[low - first : high - first])

    @prepared
    def broadcast(self, call: Call, array: Array, root: int) -> Move[None]:
        """Streams the root's bytes to everyone."""
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
        """Streams every member's bytes to every member, or to the root."""
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
        """Streams every member's bytes; each member keeps the piece that was cut for it."""
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
        """Every member's bytes pass by every member, block by block.

        ``turn`` is that of the first block, if it has been filled and all have arrived since.
        """
        channel = self.channel
        # A block has its turn even if all members are empty.
        for start in range(0, max(1, *lengths), channel.block):
            if start or turn is None:
                turn = self._fill(source, start)
                yield from channel.meet(call)
            channel.turn = turn
            for member, length in enumerate(lengths):
                size = min(channel.block, length - start)
                if size > 0:
                    read(member, start, channel.blocks[member][turn][:size])

    def _step(self, array: Array) -> int:
        """How many elements a block holds."""
        return max(1, self.channel.block // array.dtype.itemsize)

    def _stage(self, part: Array, how: Arithmetic) -> int:
        """Fills the next block with values, and returns its turn."""
        turn = self.channel.turn ^ 1
        how.staged(part, self._blocks(part.dtype, part.shape, turn)[self.members.me])
        return turn

    def _blocks(self, dtype: np.dtype[Any], shape: tuple[int, ...], turn: int) -> list[Array]:
        """Every member's block of one turn, seen as an array."""
        key = dtype, shape, turn
        parts = self._parts.get(key)
        if parts is None:
            nbytes = math.prod(shape) * dtype.itemsize
            blocks = [pair[turn][:nbytes] for pair in self.channel.blocks]
            parts = keep(self._parts, key, [block.view(dtype).reshape(shape) for block in blocks])
        return parts

    def _fill(self, source: Array, start: int) -> int:
        """Fills the next block with bytes, and returns its turn."""
        turn = self.channel.turn ^ 1
        part = source[start : start + self.channel.block]
        np.copyto(self.channel.blocks[self.members.me][turn][: part.size], part)
        return turn


def keep(known: dict[Any, T], key: object, made: T) -> T:
    """Keeps a value that will be used again; forgets all others once there are too many."""
    if len(known) >= _KEPT:
        known.clear()
    known[key] = made
    return made


def split(count: int, members: int) -> list[int]:
    """Bounds of ``members`` slices of ``count`` elements, as equal as possible, longest first."""
    each, rest = divmod(count, members)
    return [index * each + min(index, rest) for index in range(members + 1)]
