"""Data through memory that the ranks of one host share.

Private arrays stream through the channel's blocks, which stay in the caches: everyone writes a
block, arrives, and reads what it needs of the others' blocks while the next ones are filled. The
first block is written while a call is prepared, so that the arrival at which all agree is the one
after which it may be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import NOTHING, NOWHERE, Call, Move, Offer, Prepared, prepared
from allranks.collectives.calls.wait import Steps
from allranks.collectives.host.channel import Channel
from allranks.collectives.host.window import WARM_BYTES, Window, place
from allranks.collectives.host.windowed import (
    Block,
    blocks,
    chunk,
    reduce_blocks,
    straight_bytes,
)

T = TypeVar("T")
Straight = tuple[int, Array, Callable[..., Array]]
"""Bytes, this rank's block of one turn, and what makes the result once all have filled theirs."""
Found = tuple[bool, list[list[Block]] | None]
"""Whether only some members copy, and what is to be reduced; None where that is nowhere."""
_KEPT = 1024
"""Kinds of calls whose views of the shared memory are kept: making them takes longer than using."""
_SLICE_FROM = 4
"""Members from which each reduces only its slice: below, reducing everything saves an arrival."""


class Shared:
    """Transport over one channel, and over the members' windows where they have some."""

    name = "shared"

    def __init__(self, channel: Channel, window: Window | None) -> None:
        self.members, self.channel, self.window = channel.members, channel, window
        self._straight_bytes = straight_bytes(self.members.size, channel.block)
        self._straight: tuple[dict[Arithmetic, Straight], ...] = ({}, {})
        self._parts: dict[tuple[np.dtype[Any], tuple[int, ...], int], list[Array]] = {}
        self._offers: dict[tuple[object, ...], Offer] = {}
        self._found: dict[tuple[object, ...], Found] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array, where the other members can reach it if that pays."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > WARM_BYTES and self.window is not None:
            out = self.window.empty(shape, dtype, nbytes)
            if out is not None:
                return out
        return np.empty(shape, dtype)

    def renew(self) -> None:
        """Nothing is left of an epoch here."""

    def allreduce(
        self, call: Call, source: Array, how: Arithmetic, out: Array | None = None
    ) -> Prepared[Array]:
        """Small arrays go through the blocks, the others are reduced where they lie."""
        nbytes = source.nbytes
        if nbytes <= self._straight_bytes:
            turn = self.channel.turn ^ 1
            known = self._straight[turn].get(how)
            if known is None or known[0] != nbytes:
                known = self._begin_straight(source, how, turn)
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
        return offer, self.in_windows(call, None, source, found, how, copied=copied)

    def _begin_straight(self, source: Array, how: Arithmetic, turn: int) -> Straight:
        """What fits in one block takes a single arrival, at which all have agreed."""
        channel = self.channel
        parts = self._blocks(source.dtype, source.shape, turn)
        sum_of_two = how.ufunc if how.bare and len(parts) == 2 and source.ndim else None

        def rest(out: Array | None = None) -> Array:
            channel.turn = turn
            if sum_of_two and out is None:
                return sum_of_two(*parts)  # type: ignore[no-any-return]
            return how.combine(parts, out)

        known = source.nbytes, parts[self.members.me], rest
        return keep(self._straight[turn], how, known)

    def in_windows(
        self,
        call: Call,
        offers: list[Offer] | None,
        source: Array,
        out: Array,
        how: Arithmetic,
        *,
        copied: bool,
    ) -> Steps[Array]:
        """Reduces where the arrays lie, if all lie in a window; all members have agreed.

        ``offers`` are what the members have agreed on where it is None.
        """
        told = offers or self.channel.offered(call)
        key = how, source.size, copied, *told
        mixed, todo = self._found.get(key) or self._find(call, offers, key)
        if todo is None:
            return (yield from self._through_blocks(source, out, how, call))
        channel, step, flat = self.channel, chunk(how.dtype), out.reshape(-1)
        if mixed:
            # Some members have copied their first chunk and some had nothing to copy.
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

    def _find(self, call: Call, offers: list[Offer] | None, key: tuple[Any, ...]) -> Found:
        how, size, copied, *_ = key
        offers = offers or self.channel.offers(call)
        places = [offer.place for offer in offers]
        mixed, todo = any(offer.copied is not copied for offer in offers), None
        if self.window is not None and NOWHERE not in places:
            todo = blocks(
                self.window, self.members, places, size, how.dtype, copied=copied or mixed
            )
        return keep(self._found, key, (mixed, todo))

    def _through_blocks(
        self, source: Array, out: Array, how: Arithmetic, call: Call, turn: int | None = None
    ) -> Steps[Array]:
        """Reduces block by block.

        ``turn`` is that of the first block, where it has been laid out and all have arrived since.
        """
        channel, step, flat = self.channel, self._step(source), out.reshape(-1)
        by_slice = source.nbytes > self._straight_bytes and self.members.size >= _SLICE_FROM
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
        """Streams everyone's bytes to everyone, or to the root."""
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
        """Streams everyone's bytes; each member keeps the piece that was cut for it."""
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

        ``turn`` is that of the first block, where it has been laid out and all have arrived since.
        """
        channel = self.channel
        # Where nobody brings anything the block has its turn all the same.
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
        """Fills the block whose turn is next with values, and returns which one that is."""
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
        """The same, with bytes."""
        turn = self.channel.turn ^ 1
        part = source[start : start + self.channel.block]
        np.copyto(self.channel.blocks[self.members.me][turn][: part.size], part)
        return turn


def keep(known: dict[Any, T], key: object, made: T) -> T:
    """Keeps what is used again, and forgets the rest where that has become too much."""
    if len(known) >= _KEPT:
        known.clear()
    known[key] = made
    return made


def split(count: int, members: int) -> list[int]:
    """Bounds of ``members`` slices of ``count`` elements, as equal as can be, longest first."""
    each, rest = divmod(count, members)
    return [index * each + min(index, rest) for index in range(members + 1)]
