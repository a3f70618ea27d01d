"""Data between ranks of several hosts: memory on each host, MPI between their first ranks.

An array passes in chunks: the ranks of a host fill a block each, its first rank makes of them what
goes between hosts, and lays out what all hosts' come to for the others to read. While one chunk is
between the hosts the next one is filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import NOTHING, Call, Move, Offer, Prepared, prepared
from allranks.collectives.calls.transport import as_bytes
from allranks.collectives.calls.wait import Steps
from allranks.collectives.host.shared import keep
from allranks.collectives.mpi.chunks import Carry, Chunks, overlaps, passed
from allranks.collectives.mpi.gathering import Gathering
from allranks.collectives.mpi.several import Several
from allranks.collectives.mpi.transport import Mpi

Carried = tuple[Array, Carry, Callable[..., Any]]
"""This rank's block for a small array, what goes with an agreement, and what makes the result."""


class Bridge:
    """Transport over the channels of several hosts, and `Mpi` for what becomes no less there."""

    name = "hosts"

    def __init__(self, several: Several, flat: Mpi) -> None:
        self.several, self.flat, self.members = several, flat, several.members
        self.channel, self.desk, self.firsts = several.channel, several.desk, several.firsts
        self._here = self.channel.members.me
        self._carried, self._bytes = several.carried, several.block
        self._known: dict[tuple[Arithmetic, tuple[int, ...]], Carried] = {}
        """How small arrays are carried: making their views takes longer than using them."""
        self._gathering = Gathering(several, flat)
        self._little = several.spread // several.most
        """As many bytes of each member go with an agreement in any case."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array."""
        return np.empty(shape, dtype)

    def renew(self) -> None:
        """A new epoch has begun, with other rows."""
        self._known.clear()

    def allreduce(
        self, call: Call, source: Array, how: Arithmetic, out: Array | None = None
    ) -> Prepared[Array]:
        """A host's sum between the first ranks; that of a small array goes with the agreement."""
        width = max(how.dtype.itemsize, how.total.itemsize)
        if not call.posted and source.size * width <= self._carried:
            rest = self._carry_reduced(call, source, how)
            return NOTHING, rest if out is None else partial(rest, out)
        found = np.empty(source.shape, source.dtype) if out is None else out
        flat, into = source.reshape(-1), found.reshape(-1)
        step = self._bytes // width
        slots = [slot.view(how.dtype) for slot in self.desk.slots]

        def fill(chunk: int) -> None:
            part = flat[chunk * step :][:step]
            how.staged(part, self.several.mine(chunk, how.dtype)[: part.size])

        def post(chunk: int) -> Steps[None]:
            size = min(step, flat.size - chunk * step)
            parts = self.channel.blocks_as(how.dtype, size, chunk & 1)
            mine = how.merged(parts, self.firsts.scratch(chunk & 1, how.total, size))
            whole = yield from self.firsts.reduce(call, mine, how, chunk & 1)
            how.finish(whole, slots[chunk & 1][:size])

        def take(chunk: int) -> None:
            part = into[chunk * step :][:step]
            part[...] = slots[chunk & 1][: part.size]

        if flat.size:
            fill(0)
        chunks = Chunks(-(-flat.size // step), fill, post, take)
        return NOTHING, passed(self.several, call, chunks, found)

    def _carry_reduced(self, call: Call, source: Array, how: Arithmetic) -> Callable[..., Any]:
        """Has the reduction go with the agreement, and returns what makes the result then."""
        key = how, source.shape
        mine, call.carry, rest = self._known.get(key) or self._begin_carried(key)
        how.staged(source, mine)
        return rest

    def _begin_carried(self, key: tuple[Arithmetic, tuple[int, ...]]) -> Carried:
        how, shape = key
        count = math.prod(shape)
        parts = [part.reshape(shape) for part in self.channel.blocks_as(how.dtype, count, 0)]
        slot = self.desk.slots[0][: count * how.dtype.itemsize].view(how.dtype).reshape(shape)
        nbytes, totals = count * how.total.itemsize, list[Array]()
        if self.several.is_first:
            rows = zip(self.firsts.rows, self.several.carried_at, strict=True)
            whole = [np.frombuffer(row, how.total, count, at) for row, at in rows]
            totals = [total.reshape(shape) for total in whole]

        def pack() -> int:
            how.merged(parts, totals[self.several.host])
            return nbytes

        def unpack() -> None:
            how.finish(how.merged(totals, totals[0]), slot)

        def rest(out: Array | None = None, part: Any = ...) -> Array:
            if out is None:
                return slot.copy()
            out[...] = slot[part]
            return out

        return keep(self._known, key, (parts[self._here], Carry(pack, unpack), rest))

    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, how: Arithmetic
    ) -> Prepared[None]:
        """What is for a host goes there as each host's sum; a small array as in `allreduce`."""
        me, width = self.members.me, max(how.dtype.itemsize, how.total.itemsize)
        if not call.posted and source.size * width <= self.several.spread:
            rest = self._carry_reduced(call, source, how)
            return NOTHING, partial(rest, out, slice(bounds[me], bounds[me + 1]))
        places, host = self.several.places, self.several.host
        spans = [[bounds[i + 1] - bounds[i] for i in ranks] for ranks in places]
        step = self._bytes // width // len(places)
        slots = [slot.view(how.dtype) for slot in self.desk.slots]

        def sizes(chunk: int) -> list[int]:
            return [min(step, max(0, sum(span) - chunk * step)) for span in spans]

        def within(of: int, chunk: int) -> Iterator[tuple[int, slice, slice]]:
            return overlaps(spans[of], chunk * step, (chunk + 1) * step)

        def fill(chunk: int) -> None:
            block = self.several.mine(chunk, how.dtype)
            for of, size in enumerate(sizes(chunk)):
                for index, piece, where in within(of, chunk):
                    start = bounds[places[of][index]]
                    how.staged(source[start:][piece], block[where])
                block = block[size:]

        def post(chunk: int) -> Steps[None]:
            told = sizes(chunk)
            parts = self.channel.blocks_as(how.dtype, sum(told), chunk & 1)
            mine = how.merged(parts, self.firsts.scratch(chunk & 1, how.total, sum(told)))
            counts = [size * how.total.itemsize for size in told]
            coming = [counts[host]] * len(told)
            whole = yield from self.firsts.alltoall(call, as_bytes(mine), counts, coming, chunk & 1)
            totals = whole.view(how.total).reshape(len(told), told[host])
            how.finish(how.merged(list(totals)), slots[chunk & 1][: told[host]])

        def take(chunk: int) -> None:
            for index, piece, where in within(host, chunk):
                if places[host][index] == me:
                    out[piece] = slots[chunk & 1][where]

        fill(0)
        chunks = Chunks(-(-max(map(sum, spans)) // step), fill, post, take)
        return NOTHING, passed(self.several, call, chunks, None)

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
                self.several.mine(chunk, part.dtype)[: part.size] = part

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
            at = self.several.carried_at[host]

            def pack() -> int:
                if not here:
                    return 0
                self.firsts.rows[host][at : at + array.size] = laid(0, array.size).tobytes()
                return array.size

            def unpack() -> None:
                slots[0][: array.size] = np.frombuffer(
                    self.firsts.rows[host], np.uint8, array.size, at
                )

            call.carry = Carry(pack, unpack)
            return Offer(array.nbytes), partial(take, 0)
        chunks = Chunks(-(-array.size // step), fill, post, take)
        return Offer(array.nbytes), passed(self.several, call, chunks, None)

    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Prepared[list[Array]]:
        """Everyone's bytes between the first ranks; few of them go with the agreement."""
        return self._gathering.begin(call, source, lengths, root)

    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Prepared[list[Array]]:
        """Little goes with the agreement, and how much goes where; the rest as `Mpi` does it."""
        if call.posted or root >= 0 or 8 * self.members.size > self._little:
            return self.flat.alltoall(call, source, lengths, root)
        return self._alltoall(call, source, lengths)

    @prepared
    def _alltoall(self, call: Call, source: Array, lengths: Sequence[int]) -> Move[list[Array]]:
        me, head = self.members.me, 8 * self.members.size
        told = as_bytes(np.array(lengths, np.int64))
        if head + source.size <= self._little:
            told = np.concatenate([told, source])
        offer, rest = self._gathering.begin(call, told, None, -1)
        yield offer
        parts: list[Array] = yield from rest
        table = np.stack([part[:head].view(np.int64) for part in parts])
        if any(part.size - head != sum(cuts) for part, cuts in zip(parts, table, strict=True)):
            return (yield from self.flat.exchange(call, source, lengths, table[:, me].tolist()))
        ends = head + np.cumsum(table, 1)[:, me]
        spans = zip(parts, (ends - table[:, me]).tolist(), ends.tolist(), strict=True)
        return [part[low:high] for part, low, high in spans]
