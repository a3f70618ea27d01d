"""Data through memory that the ranks of one host share. Runs in every rank.

Private arrays stream through the channel's blocks, which stay in the caches: everyone writes a
block, arrives, and reads what it needs of the others' blocks while the next ones are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.host.channel import NOWHERE, Channel, Place
from allranks.collectives.host.window import place
from allranks.collectives.host.windowed import blocks, chunk, reduce_blocks, straight

if TYPE_CHECKING:
    from allranks.collectives.arrays.reductions import Arithmetic
    from allranks.collectives.calls.call import Call
    from allranks.collectives.calls.wait import Steps
    from allranks.collectives.world.group import Group

Array = NDArray[Any]
_SLICE_FROM = 4
"""Members from which each reduces only its slice: below, reducing everything saves an arrival."""


class Shared:
    """Transport over one channel."""

    name = "shared"

    def __init__(self, group: Group, channel: Channel) -> None:
        self.group, self.channel = group, channel

    def _arrive(self, call: Call, extent: int = 0, place: Place = NOWHERE) -> Steps[None]:
        """Arrives; the first arrival of a call is its agreement."""
        if call.posted:
            return self.channel.sync(call)
        return self.group.agree(call, extent, place)

    def allreduce(self, call: Call, source: Array, out: Array, how: Arithmetic) -> Steps[None]:
        """Small arrays go through the blocks, the others are reduced where they lie."""
        channel, window, dtype = self.channel, self.group.world.window, source.dtype
        small = straight(channel.members, source.nbytes, channel.block)
        if small or window is None or call.posted:
            yield from self._through_blocks(call, source, out, how)
            return
        at, source_at = window.place_of(out), window.place_of(source)
        copied = not source_at[0] or not how.plain
        call.held = source, out
        if copied and at[0]:
            step = chunk(dtype)
            how.staged(source[:step], out[:step])
        yield from self._arrive(call, int(copied), place(at if copied else source_at, at))
        yield from self.in_windows(call, source, out, how, copied=copied)
        call.held = None

    def in_windows(
        self, call: Call, source: Array, out: Array, how: Arithmetic, *, copied: bool
    ) -> Steps[None]:
        """Reduces where the arrays lie, if all lie in a window; all members have agreed."""
        channel, step = self.channel, chunk(how.dtype)
        if NOWHERE in call.places:
            yield from self._through_blocks(call, source, out, how)
            return
        if len(set(call.extents)) > 1:
            # Some members have copied their first chunk and some had nothing to copy.
            if not copied:
                how.staged(source[:step], out[:step])
            copied = True
            yield from channel.sync(call)
        todo = blocks(self.group, call.places, source.size, how.dtype, copied=copied)
        for index, found in enumerate(todo):
            if index and copied:
                start = index * step
                how.staged(source[start : start + step], out[start : start + step])
                yield from channel.sync(call)
            reduce_blocks(found, how)
        yield from channel.sync(call)

    def _through_blocks(
        self, call: Call, source: Array, out: Array, how: Arithmetic
    ) -> Steps[None]:
        """Reduces block by block; what fits in one block takes a single arrival, the guard's."""
        channel = self.channel
        by_slice = not straight(channel.members, source.nbytes, channel.block)
        by_slice = by_slice and channel.members >= _SLICE_FROM
        step = max(1, channel.block // source.dtype.itemsize)
        for start in range(0, max(1, source.size), step):
            part, into = source[start : start + step], out[start : start + step]
            turn = channel.turn ^ 1
            parts = channel.blocks_as(source.dtype, part.size, turn)
            how.staged(part, parts[channel.me])
            yield from self._arrive(call)
            channel.turn = turn
            if not by_slice:
                how.combine(parts, into)
                continue
            bounds = split(part.size, channel.members)
            mine = slice(bounds[channel.me], bounds[channel.me + 1])
            how.combine([p[mine] for p in parts], into[mine])
            np.copyto(parts[channel.me][mine], into[mine])
            yield from channel.sync(call)
            for index in range(channel.members):
                if index != channel.me:
                    theirs = slice(bounds[index], bounds[index + 1])
                    np.copyto(into[theirs], parts[index][theirs])

    def reducescatter(
        self,
        call: Call,
        source: Array,
        bounds: Sequence[int],
        out: Array,
        how: Arithmetic,
    ) -> Steps[None]:
        """Every member reduces the part of each block that is its own."""
        channel = self.channel
        first, last = bounds[channel.me], bounds[channel.me + 1]
        step = max(1, channel.block // source.dtype.itemsize)
        for start in range(0, max(1, source.size), step):
            part = source[start : start + step]
            turn = channel.turn ^ 1
            parts = channel.blocks_as(source.dtype, part.size, turn)
            how.staged(part, parts[channel.me])
            yield from self._arrive(call)
            channel.turn = turn
            low, high = max(first, start), min(last, start + part.size)
            if low < high:
                here = slice(low - start, high - start)
                how.combine([p[here] for p in parts], out[low - first : high - first])

    def broadcast(self, call: Call, array: Array, root: int) -> Steps[None]:
        """Streams the root's bytes to everyone."""
        source = array if root == self.channel.me else array[:0]

        def read(member: int, start: int, block: Array) -> None:
            if member != self.channel.me:
                np.copyto(array[start : start + block.size], block)

        lengths = [array.nbytes if i == root else 0 for i in range(self.channel.members)]
        yield from self._stream(call, source, lambda: lengths, read)

    def allgather(
        self,
        call: Call,
        source: Array,
        lengths: list[int] | None = None,
        root: int = -1,
    ) -> Steps[list[Array]]:
        """Streams everyone's bytes to everyone, or to the root."""
        outs: list[Array] = []
        reads = root in (-1, self.channel.me)

        def extents() -> list[int]:
            found = lengths or call.extents
            outs.extend(np.empty(n if reads else 0, np.uint8) for n in found)
            return found

        def read(member: int, start: int, block: Array) -> None:
            if reads:
                np.copyto(outs[member][start : start + block.size], block)

        yield from self._stream(call, source, extents, read)
        return outs

    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Steps[list[Array]]:
        """Streams everyone's bytes; each member keeps the piece that was cut for it."""
        me, members = self.channel.me, self.channel.members
        head = np.array(lengths, np.int64).view(np.uint8)
        sizes = [8 * members if root in (-1, index) else 0 for index in range(members)]
        tables = yield from self.allgather(call, head, sizes)
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

        totals = [int(cut[-1]) for cut in cuts]
        yield from self._stream(call, source, lambda: totals, read)
        return outs

    def _stream(
        self,
        call: Call,
        source: Array,
        lengths: Callable[[], list[int]],
        read: Callable[[int, int, Array], None],
    ) -> Steps[None]:
        """Every member's bytes pass by every member, block by block.

        ``lengths`` is asked once all have arrived.
        """
        channel = self.channel
        turn = self._fill(source, 0)
        yield from self._arrive(call, source.nbytes)
        channel.turn = turn
        every = lengths()
        for start in self._starts(max(every)):
            if start:
                turn = self._fill(source, start)
                yield from channel.sync(call)
                channel.turn = turn
            for member, length in enumerate(every):
                size = min(channel.block, length - start)
                if size > 0:
                    read(member, start, channel.blocks[member][turn][:size])

    def _fill(self, source: Array, start: int) -> int:
        """Fills the block whose turn is next, and returns which one that is."""
        channel = self.channel
        turn = channel.turn ^ 1
        part = source[start : start + channel.block]
        np.copyto(channel.blocks[channel.me][turn][: part.size], part)
        return turn

    def _starts(self, longest: int) -> Iterator[int]:
        return iter(range(0, longest, self.channel.block))


def split(count: int, members: int) -> list[int]:
    """Bounds of ``members`` slices of ``count`` elements, as equal as can be, longest first."""
    each, rest = divmod(count, members)
    return [index * each + min(index, rest) for index in range(members + 1)]
