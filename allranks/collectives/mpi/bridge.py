"""Data between ranks of several hosts: memory on each host, MPI between their first ranks.

An array passes in chunks: the ranks of a host fill a block each, its first rank makes of them what
goes between hosts, and lays out what all hosts' come to for the others to read. While one chunk is
between the hosts the next one is filled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import NOTHING, Call, Offer, Prepared
from allranks.collectives.calls.wait import Steps
from allranks.collectives.host.desk import DONE
from allranks.collectives.host.memory import fence
from allranks.collectives.mpi.several import Several
from allranks.collectives.mpi.transport import Mpi

_KEPT = 256
_AHEAD = 2
"""So many chunks are under way at most, as a rank has blocks."""


class Carry(NamedTuple):
    """What goes with an agreement: what the first rank of a host adds, and what it does then."""

    pack: Callable[[], Array]
    unpack: Callable[[list[memoryview]], None]


class Chunks(NamedTuple):
    """What each rank does with a chunk, by its number."""

    many: int
    fill: Callable[[int], None]
    """Lays out this rank's part, where its first rank reads it."""
    post: Callable[[int], Steps[None]]
    """On a first rank: ends when it lies in the slot whose turn it is."""
    take: Callable[[int], None]
    """Reads it there."""


class Bridge:
    """Transport over the channels of several hosts, and `Mpi` for the rest."""

    name = "hosts"

    def __init__(self, several: Several, flat: Mpi) -> None:
        self.several, self.flat, self.members = several, flat, several.members
        self.channel, self.desk, self.firsts = several.channel, several.desk, several.firsts
        self._here = self.channel.members.me
        self._carried, self._bytes = several.carried, several.block
        self._known: dict[tuple[np.dtype[Any], tuple[int, ...]], tuple[list[Array], Array]] = {}
        # Bytes of each member's part of a chunk that all have parts in.
        self._share = max(1, self._bytes // self.members.size // 64 * 64)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array."""
        return np.empty(shape, dtype)

    def renew(self) -> None:
        """Nothing is left of an epoch here."""

    def allreduce(
        self, call: Call, source: Array, how: Arithmetic, out: Array | None = None
    ) -> Prepared[Array]:
        """A host's sum between the first ranks; that of a small array goes with the agreement."""
        width = max(how.dtype.itemsize, how.total.itemsize)
        if not call.posted and source.size * width <= self._carried:
            return self._carry_reduced(call, source, how, out)
        found = np.empty(source.shape, source.dtype) if out is None else out
        flat, into = source.reshape(-1), found.reshape(-1)
        step = self._bytes // width
        slots = [slot.view(how.dtype) for slot in self.desk.slots]

        def fill(chunk: int) -> None:
            part = flat[chunk * step :][:step]
            how.staged(part, self._block(chunk, how.dtype)[: part.size])

        def post(chunk: int) -> Steps[None]:
            size = min(step, flat.size - chunk * step)
            parts = self.channel.blocks_as(how.dtype, size, chunk & 1)
            mine = how.merged(parts, self.firsts.scratch(chunk & 1, how.total, size))
            whole = yield from self.firsts.reduce(call, mine, how)
            how.finish(whole, slots[chunk & 1][:size])

        def take(chunk: int) -> None:
            part = into[chunk * step :][:step]
            part[...] = slots[chunk & 1][: part.size]

        if flat.size:
            fill(0)
        chunks = Chunks(-(-flat.size // step), fill, post, take)
        return NOTHING, self._passed(call, chunks, found)

    def _carry_reduced(
        self, call: Call, source: Array, how: Arithmetic, out: Array | None
    ) -> Prepared[Array]:
        parts, slot = self._views(how.dtype, source.shape)
        how.staged(source, parts[self._here])

        def unpack(rows: list[memoryview]) -> None:
            totals = [np.frombuffer(row, how.total).reshape(source.shape) for row in rows]
            how.finish(how.merged(totals), slot)

        def rest() -> Array:
            if out is None:
                return slot.copy()
            out[...] = slot
            return out

        call.carry = Carry(partial(how.merged, parts), unpack)
        return NOTHING, rest

    def _views(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[list[Array], Array]:
        """The first chunk's blocks and slot, seen as arrays; kept, as making them takes long."""
        key = dtype, shape
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            size = math.prod(shape)
            parts = [part.reshape(shape) for part in self.channel.blocks_as(dtype, size, 0)]
            slot = self.desk.slots[0][: size * dtype.itemsize].view(dtype).reshape(shape)
            known = self._known[key] = parts, slot
        return known

    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, how: Arithmetic
    ) -> Prepared[None]:
        """As `Mpi` does it."""
        return self.flat.reducescatter(call, source, bounds, out, how)

    def broadcast(self, call: Call, array: Array, root: int) -> Prepared[None]:
        """The root's bytes between the first ranks; few of them go with the agreement."""
        rank, step = self.members.ranks[root], self._bytes
        host = next(i for i, ranks in enumerate(self.several.hosts) if rank in ranks)
        place = self.several.hosts[host].index(rank)
        mine, here = rank == self.members.rank, host == self.several.host
        slots = self.desk.slots

        def fill(chunk: int) -> None:
            if mine:
                part = array[chunk * step :][:step]
                self._block(chunk, part.dtype)[: part.size] = part

        def laid(chunk: int, size: int) -> Array:
            return self.channel.blocks_as(array.dtype, size, chunk & 1)[place]

        def post(chunk: int) -> Steps[None]:
            size = min(step, array.size - chunk * step)
            slot = slots[chunk & 1][:size]
            if here:
                slot[...] = laid(chunk, size)
                yield from self.firsts.broadcast(call, slot, host)
                return
            into = self.firsts.scratch(chunk & 1, array.dtype, size)
            yield from self.firsts.broadcast(call, into, host)
            slot[...] = into

        def take(chunk: int) -> None:
            if not mine:
                part = array[chunk * step :][:step]
                part[...] = slots[chunk & 1][: part.size]

        fill(0)
        if not call.posted and array.nbytes <= self._carried:

            def unpack(rows: list[memoryview]) -> None:
                slots[0][: array.size] = np.frombuffer(rows[host], np.uint8)

            call.carry = Carry(lambda: laid(0, array.size) if here else array[:0], unpack)
            return Offer(array.nbytes), partial(self._taken, take, None)
        chunks = Chunks(-(-array.size // step), fill, post, take)
        return Offer(array.nbytes), self._passed(call, chunks, None)

    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Prepared[list[Array]]:
        """Everyone's bytes between the first ranks; few of them go with the agreement."""
        part = source[: self._share]
        self._block(0, part.dtype)[: part.size] = part
        carried = not call.posted and lengths is None
        if carried:
            call.carry = self._gathered(call)
        return Offer(source.nbytes), self._gather(call, source, lengths, root, carried=carried)

    def _gathered(self, call: Call) -> Carry:
        """What goes with the agreement where little is gathered on each host."""
        several, channel = self.several, self.channel

        def pack() -> Array:
            sizes = [offer.nbytes for offer in channel.offers(call)]
            return self._laid(0, sizes if sum(sizes) <= self._carried else [])

        def unpack(rows: list[memoryview]) -> None:
            if self._is_carried(several.desk.offers.tolist()):
                whole = np.frombuffer(b"".join(rows), np.uint8)
                self.desk.slots[0][: whole.size] = whole

        return Carry(pack, unpack)

    def _is_carried(self, sizes: Sequence[int]) -> bool:
        """Whether what members bring, so many bytes, host by host, has gone with the agreement."""
        left = iter(sizes)
        return all(sum(next(left) for _ in ranks) <= self._carried for ranks in self.several.hosts)

    def _laid(self, chunk: int, sizes: Sequence[int]) -> Array:
        """What the members on this host have laid out, one after the other."""
        blocks = [pair[chunk & 1] for pair in self.channel.blocks]
        parts = [block[:size] for block, size in zip(blocks, sizes, strict=False)]
        return np.concatenate(parts) if parts else blocks[0][:0]

    def _gather(
        self,
        call: Call,
        source: Array,
        lengths: Sequence[int] | None,
        root: int,
        *,
        carried: bool,
    ) -> Steps[list[Array]]:
        sizes = list(lengths) if lengths else [o.nbytes for o in call.agreement.offers(call)]
        reads = root in (-1, self.members.me)
        outs = [np.empty(size if reads else 0, np.uint8) for size in sizes]
        step, order, hosts = self._share, self.several.order, self.several.hosts
        end = -1
        if root >= 0:
            rank = self.members.ranks[root]
            end = next(i for i, ranks in enumerate(hosts) if rank in ranks)

        def cut(chunk: int) -> list[int]:
            return [max(0, min(step, sizes[place] - chunk * step)) for place in order]

        def fill(chunk: int) -> None:
            part = source[chunk * step :][:step]
            self._block(chunk, part.dtype)[: part.size] = part

        def post(chunk: int) -> Steps[None]:
            left = iter(cut(chunk))
            counts: list[int] = []
            here: list[int] = []
            for index, ranks in enumerate(hosts):
                sizes = [next(left) for _ in ranks]
                counts.append(sum(sizes))
                here = sizes if index == self.several.host else here
            mine = self._laid(chunk, here)
            whole = yield from self.firsts.gather(call, mine, counts, end)
            self.desk.slots[chunk & 1][: whole.size] = whole

        def take(chunk: int) -> None:
            at = 0
            for place, size in zip(order, cut(chunk), strict=True):
                if reads:
                    slot = self.desk.slots[chunk & 1][at : at + size]
                    outs[place][chunk * step :][:size] = slot
                at += size

        if carried and self._is_carried([sizes[place] for place in order]) and max(sizes) <= step:
            take(0)
            return outs
        chunks = Chunks(-(-max(sizes) // step), fill, post, take)
        yield from self._passed(call, chunks, outs)
        return outs

    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Prepared[list[Array]]:
        """As `Mpi` does it."""
        return self.flat.alltoall(call, source, lengths, root)

    def _taken(self, take: Callable[[int], None], result: Any) -> Any:
        """The end of a call whose data has come with the agreement."""
        take(0)
        return result

    def _passed(self, call: Call, chunks: Chunks, result: Any) -> Steps[Any]:
        """Ends with the result when all chunks have passed; the first one has been filled."""
        several, channel, words = self.several, self.channel, self.desk.words
        before = several.ticks
        several.ticks += chunks.many
        under_way: deque[Steps[None]] = deque()

        def advance() -> None:
            """On a first rank: takes what is between the hosts further, and tells what is there."""
            while under_way and next(under_way[0], None) is None:
                under_way.popleft()
                fence()
                words[DONE] = max(words[DONE], before) + 1
            for steps in list(under_way)[1:]:
                next(steps, None)

        def until(ready: Callable[[], bool]) -> Steps[None]:
            call.stage += 1
            while not ready():
                yield call
                advance()

        def reached(there: int) -> bool:
            return words[DONE] >= there

        for chunk in range(chunks.many + _AHEAD):
            if chunk >= _AHEAD:
                there = before + chunk - _AHEAD + 1
                yield from until(partial(reached, there))
                fence()
                chunks.take(chunk - _AHEAD)
            if chunk >= chunks.many:
                continue
            if chunk:
                chunks.fill(chunk)
                channel.count += 1
                fence()
                channel.show()
            if several.is_first:
                yield from until(channel.complete)
                fence()
                under_way.append(chunks.post(chunk))
                advance()
        return result

    def _block(self, chunk: int, dtype: np.dtype[Any]) -> Array:
        """This rank's block for a chunk."""
        block: Array = self.channel.blocks[self._here][chunk & 1].view(dtype)
        return block
