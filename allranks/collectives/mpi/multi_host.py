"""The transport of several hosts: shared memory on each host, MPI between the hosts' first ranks.

An array passes in chunks: the ranks of a host fill a block each, its first rank combines them into
what goes between hosts, and writes the result of all hosts where the others can read it. While one
chunk is between the hosts the next one is filled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import (
    LONGEST_SLEEP,
    NOTHING,
    SHORTEST_SLEEP,
    Call,
    Move,
    Offer,
    Prepared,
    Steps,
    as_bytes,
    prepared,
)
from allranks.collectives.host.memory import fence
from allranks.collectives.host.shared_memory import keep
from allranks.collectives.mpi.agreement import DONE, MultiHostAgreement
from allranks.collectives.mpi.transport import MpiTransport

T = TypeVar("T")
_AHEAD = 2
"""Largest number of chunks under way: the number of blocks that a rank has."""


class Carry(NamedTuple):
    """Small values that travel with an agreement, in the rows that leaders exchange."""

    pack: Callable[[], int]
    """Writes this host's values into its row, and returns their bytes."""
    unpack: Callable[[], object]
    """Writes the values of all rows where the ranks of this host read them."""
    reads_offers: bool
    """Whether ranks read how many bytes each of them offers."""


class Chunks(NamedTuple):
    """The number of chunks, and what each rank does with one, by its index."""

    number: int
    fill: Callable[[int], None]
    """Writes this rank's part where the leader reads it."""
    post: Callable[[int], Steps[None]]
    """On a leader: ends when the result is in the slot of this turn."""
    take: Callable[[int], None]
    """Reads the result there."""


def overlaps(lengths: Sequence[int], low: int, high: int) -> Iterator[tuple[int, slice, slice]]:
    """The pieces in ``low:high``: index, part of the piece, and place, counted from ``low``."""
    at = 0
    for index, length in enumerate(lengths):
        first, last = max(at, low), min(at + length, high)
        if first < last:
            yield index, slice(first - at, last - at), slice(first - low, last - low)
        at += length


def move_chunks(agreement: MultiHostAgreement, call: Call, chunks: Chunks, result: T) -> Steps[T]:
    """Ends with the result when all chunks have passed; the first one has been filled."""
    channel, words = agreement.channel, agreement.buffer.words
    before = agreement.ticks
    agreement.ticks += chunks.number
    under_way: deque[Steps[None]] = deque()
    if agreement.is_first:
        # MPI moves data only within its calls.
        call.longest_sleep = SHORTEST_SLEEP

    def advance() -> None:
        """On a leader: drives the transfers between hosts, and publishes results."""
        while under_way and next(under_way[0], None) is None:
            under_way.popleft()
            fence()
            # In a new epoch the word still holds a lower number, of the one before.
            words[DONE] = max(words[DONE], before) + 1
        # Later chunks move too, but are published in order.
        for steps in list(under_way)[1:]:
            next(steps, None)

    def until(ready: Callable[[], bool]) -> Steps[None]:
        call.stage += 1
        while not ready():
            yield call
            advance()

    def reached(there: int) -> bool:
        return words[DONE] >= there

    for chunk in range(chunks.number + _AHEAD):
        if chunk >= _AHEAD:
            there = before + chunk - _AHEAD + 1
            yield from until(partial(reached, there))
            fence()
            chunks.take(chunk - _AHEAD)
        if chunk >= chunks.number:
            continue
        if chunk:
            chunks.fill(chunk)
            channel.count += 1
            fence()
            channel.publish_count()
        if agreement.is_first:
            yield from until(channel.all_arrived)
            fence()
            under_way.append(chunks.post(chunk))
            advance()
    call.longest_sleep = LONGEST_SLEEP
    return result


Carried = tuple[Array, Carry | None, Callable[..., Any]]
"""This rank's block for a small array, on a leader the `Carry`, and the function that makes the
result."""


class MultiHostTransport:
    """Transport over the channels of several hosts; data that does not shrink there goes by MPI."""

    name = "hosts"
    exact = False

    def __init__(self, agreement: MultiHostAgreement, mpi: MpiTransport) -> None:
        self.agreement, self.mpi, self.members = agreement, mpi, agreement.members
        self.channel = agreement.channel
        self.buffer = agreement.buffer
        self.leaders = agreement.leaders
        self._here = self.channel.members.me
        self._is_pair = len(agreement.hosts) == 2 and self.channel.members.size == 1
        self._carried, self._bytes = agreement.carried_by_all, agreement.block
        self._share = max(1, agreement.block // agreement.members.size // 64 * 64)
        """Bytes of each member's part of a chunk in a gathering."""
        self._known: dict[tuple[Arithmetic, tuple[int, ...]], Carried] = {}
        """The views of small arrays: they cost more to make than to use."""
        self._little = agreement.carried_by_part // agreement.largest_host
        """Bytes of each member that always fit into an agreement."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    def renew(self) -> None:
        self._known.clear()

    def allreduce(
        self, call: Call, source: Array, reduction: Arithmetic, out: Array | None = None
    ) -> Prepared[Array]:
        """Leaders exchange their hosts' sums; that of a small array goes with the agreement."""
        width = max(reduction.dtype.itemsize, reduction.total.itemsize)
        if not call.posted and source.size * width <= self._carried:
            key = reduction, source.shape
            mine, call.carry, rest = self._known.get(key) or self._begin_carried(key)
            if reduction.copies:
                mine[...] = source
            else:
                reduction.staged(source, mine)
            return NOTHING, rest if out is None else partial(rest, out)
        found = np.empty(source.shape, source.dtype) if out is None else out
        flat, into = source.reshape(-1), found.reshape(-1)
        step = self._bytes // width
        slots = [slot.view(reduction.dtype) for slot in self.buffer.slots]
        # Without other ranks on this host, values need not pass through its memory.
        direct = self._is_pair and reduction.plain and not reduction.wider

        def fill(chunk: int) -> None:
            part = flat[chunk * step :][:step]
            if not direct:
                reduction.staged(part, self.agreement.mine(chunk, reduction.dtype)[: part.size])

        def post(chunk: int) -> Steps[None]:
            size = min(step, flat.size - chunk * step)
            if direct:
                mine, out = flat[chunk * step :][:size], into[chunk * step :][:size]
                yield from self.leaders.reduce(call, mine, reduction, chunk & 1, out)
                reduction.finish(out, out)
                return
            parts = self.channel.blocks_as(reduction.dtype, size, chunk & 1)
            mine = reduction.merged(parts, self.leaders.scratch(chunk & 1, reduction.total, size))
            whole = yield from self.leaders.reduce(call, mine, reduction, chunk & 1)
            reduction.finish(whole, slots[chunk & 1][:size])

        def take(chunk: int) -> None:
            part = into[chunk * step :][:step]
            if not direct:
                part[...] = slots[chunk & 1][: part.size]

        if flat.size:
            fill(0)
        chunks = Chunks(-(-flat.size // step), fill, post, take)
        return NOTHING, move_chunks(self.agreement, call, chunks, found)

    def _carry_reduced(
        self, call: Call, source: Array, reduction: Arithmetic
    ) -> Callable[..., Any]:
        key = reduction, source.shape
        mine, call.carry, rest = self._known.get(key) or self._begin_carried(key)
        reduction.staged(source, mine)
        return rest

    def _begin_carried(self, key: tuple[Arithmetic, tuple[int, ...]]) -> Carried:
        reduction, shape = key
        count = math.prod(shape)
        parts = [part.reshape(shape) for part in self.channel.blocks_as(reduction.dtype, count, 0)]
        slot = (
            self.buffer.slots[0][: count * reduction.dtype.itemsize]
            .view(reduction.dtype)
            .reshape(shape)
        )
        # Only leaders have rows.
        carry = self._carry_sums(reduction, parts, slot) if self.agreement.is_first else None

        def rest(out: Array | None = None, part: Any = ...) -> Array:
            if out is None:
                return slot.copy()
            out[...] = slot[part]
            return out

        return keep(self._known, key, (parts[self._here], carry, rest))

    def _carry_sums(self, reduction: Arithmetic, parts: list[Array], slot: Array) -> Carry:
        """The sum of the parts of this host's ranks, and into ``slot`` the result of all hosts."""
        rows = zip(self.leaders.rows, self.agreement.carried_at, strict=True)
        whole = [np.frombuffer(row, reduction.total, slot.size, at) for row, at in rows]
        totals = [total.reshape(slot.shape) for total in whole]
        mine = totals[self.agreement.host]
        add = reduction.merging(parts, mine)
        add_up = reduction.merging(totals, slot if reduction.bare else totals[0])

        def pack() -> int:
            add()
            return mine.nbytes

        def unpack() -> None:
            add_up()
            if not reduction.bare:
                reduction.finish(totals[0], slot)

        return Carry(pack, unpack, reads_offers=False)

    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, reduction: Arithmetic
    ) -> Prepared[None]:
        """Each host receives the other hosts' sums of its part; small arrays as in `allreduce`."""
        me, width = self.members.me, max(reduction.dtype.itemsize, reduction.total.itemsize)
        if not call.posted and source.size * width <= self.agreement.carried_by_part:
            rest = self._carry_reduced(call, source, reduction)
            return NOTHING, partial(rest, out, slice(bounds[me], bounds[me + 1]))
        places, host = self.agreement.places, self.agreement.host
        spans = [[bounds[i + 1] - bounds[i] for i in ranks] for ranks in places]
        step = self._bytes // width // len(places)
        slots = [slot.view(reduction.dtype) for slot in self.buffer.slots]

        def sizes(chunk: int) -> list[int]:
            return [min(step, max(0, sum(span) - chunk * step)) for span in spans]

        def within(of: int, chunk: int) -> Iterator[tuple[int, slice, slice]]:
            return overlaps(spans[of], chunk * step, (chunk + 1) * step)

        def fill(chunk: int) -> None:
            block = self.agreement.mine(chunk, reduction.dtype)
            for of, size in enumerate(sizes(chunk)):
                for index, piece, where in within(of, chunk):
                    start = bounds[places[of][index]]
                    reduction.staged(source[start:][piece], block[where])
                block = block[size:]

        def post(chunk: int) -> Steps[None]:
            lengths = sizes(chunk)
            parts = self.channel.blocks_as(reduction.dtype, sum(lengths), chunk & 1)
            mine = reduction.merged(
                parts, self.leaders.scratch(chunk & 1, reduction.total, sum(lengths))
            )
            counts = [size * reduction.total.itemsize for size in lengths]
            coming = [counts[host]] * len(lengths)
            whole = yield from self.leaders.alltoall(
                call, as_bytes(mine), counts, coming, chunk & 1
            )
            totals = whole.view(reduction.total).reshape(len(lengths), lengths[host])
            reduction.finish(reduction.merged(list(totals)), slots[chunk & 1][: lengths[host]])

        def take(chunk: int) -> None:
            for index, piece, where in within(host, chunk):
                if places[host][index] == me:
                    out[piece] = slots[chunk & 1][where]

        fill(0)
        chunks = Chunks(-(-max(map(sum, spans)) // step), fill, post, take)
        return NOTHING, move_chunks(self.agreement, call, chunks, None)

    def broadcast(self, call: Call, array: Array, root: int) -> Prepared[None]:
        """Leaders send the root's bytes; few bytes go with the agreement."""
        rank, step = self.members.ranks[root], self._bytes
        host = next(i for i, ranks in enumerate(self.agreement.hosts) if rank in ranks)
        place = self.agreement.hosts[host].index(rank)
        mine, here = rank == self.members.rank, host == self.agreement.host
        slots = self.buffer.slots

        def fill(chunk: int) -> None:
            if mine:
                self._lay(chunk, array, step)

        def post(chunk: int) -> Steps[None]:
            size = min(step, array.size - chunk * step)
            slot = slots[chunk & 1][:size]
            if here:
                slot[...] = self.channel.blocks_as(array.dtype, size, chunk & 1)[place]
                yield from self.leaders.broadcast(call, slot, host)
                return
            into = self.leaders.scratch(chunk & 1, array.dtype, size)
            yield from self.leaders.broadcast(call, into, host)
            slot[...] = into

        def take(chunk: int) -> None:
            if not mine:
                part = array[chunk * step :][:step]
                part[...] = slots[chunk & 1][: part.size]

        fill(0)
        if not call.posted and array.nbytes <= self._carried:
            # An allgather to which the other members contribute nothing.
            call.carry = self._carry_gathered(call, step)
            return Offer(array.nbytes if mine else 0), partial(take, 0)
        chunks = Chunks(-(-array.size // step), fill, post, take)
        return NOTHING, move_chunks(self.agreement, call, chunks, None)

    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Prepared[list[Array]]:
        """Leaders exchange their hosts' parts; few bytes go with the agreement."""
        carried = not call.posted and lengths is None
        self._lay(0, source, self._share)
        if carried:
            call.carry = self._carry_gathered(call, self._share)
        rest = self._gather(call, source, lengths, root, carried=carried)
        return Offer(source.nbytes), rest

    def _lay(self, chunk: int, source: Array, step: int) -> None:
        """Writes this rank's part of a chunk where the leader reads it."""
        part = source[chunk * step :][:step]
        self.agreement.mine(chunk, part.dtype)[: part.size] = part

    def _carry_gathered(self, call: Call, most: int) -> Carry:
        """The values of an allgather that go with the agreement, if each host brings few bytes and
        each member at most ``most``.
        """
        # Both run on leaders only; other ranks have no rows.
        agreement, leaders, starts = self.agreement, self.leaders, self.agreement.carried_at

        def pack() -> int:
            sizes = self.channel.sizes(call)
            if sum(sizes) > self._carried or max(sizes) > most:
                return 0
            mine, start = self._laid(0, sizes), starts[agreement.host]
            leaders.rows[agreement.host][start : start + mine.size] = mine.tobytes()
            return mine.size

        def unpack() -> None:
            brought = self._brought(self.buffer.offers.tolist())
            if max(brought) <= self._carried:
                parts = zip(leaders.rows, starts, brought, strict=True)
                whole = b"".join([row[start : start + size] for row, start, size in parts])
                self.buffer.slots[0][: len(whole)] = np.frombuffer(whole, np.uint8)

        return Carry(pack, unpack, reads_offers=True)

    def _brought(self, sizes: Sequence[int]) -> list[int]:
        """The bytes of each host, from those of its members, host by host."""
        left = iter(sizes)
        return [sum(islice(left, len(ranks))) for ranks in self.agreement.hosts]

    def _laid(self, chunk: int, sizes: Sequence[int]) -> Array:
        """The blocks of the members on this host, one after the other."""
        blocks = [pair[chunk & 1] for pair in self.channel.blocks]
        return np.concatenate([b[:size] for b, size in zip(blocks, sizes, strict=True)])

    def _gather(
        self,
        call: Call,
        source: Array,
        lengths: Sequence[int] | None,
        root: int = -1,
        *,
        carried: bool,
    ) -> Steps[list[Array]]:
        agreement, step, slots = self.agreement, self._share, self.buffer.slots
        sizes = list(lengths) if lengths else [o.nbytes for o in agreement.offers(call)]
        brought = self._brought([sizes[place] for place in agreement.order])
        carried = carried and max(brought) <= self._carried and max(sizes) <= step
        if root >= 0 and not carried:
            # Nothing shrinks on the way. That each rank sends its own is faster, as measured.
            return (yield from self.mpi.gather(call, source, sizes, root))
        reads = root in (-1, self.members.me)
        outs = [np.empty(size if reads else 0, np.uint8) for size in sizes]

        def cut(chunk: int) -> list[list[int]]:
            return [
                [max(0, min(step, sizes[place] - chunk * step)) for place in places]
                for places in agreement.places
            ]

        def post(chunk: int) -> Steps[None]:
            parts = cut(chunk)
            mine, counts = self._laid(chunk, parts[agreement.host]), list(map(sum, parts))
            whole = yield from self.leaders.gather(call, mine, counts, chunk & 1)
            slots[chunk & 1][: whole.size] = whole

        def take(chunk: int) -> None:
            at = 0
            for place, size in zip(agreement.order, chain(*cut(chunk)), strict=True):
                if reads:
                    outs[place][chunk * step :][:size] = slots[chunk & 1][at:][:size]
                at += size

        if carried:
            take(0)
            return outs
        fill = partial(self._lay, source=source, step=step)
        chunks = Chunks(-(-max(sizes) // step), fill, post, take)
        return (yield from move_chunks(agreement, call, chunks, outs))

    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Prepared[list[Array]]:
        """Sends few bytes, and all lengths, with the agreement; the rest by `MpiTransport`."""
        if call.posted or root >= 0 or 8 * self.members.size > self._little:
            return self.mpi.alltoall(call, source, lengths, root)
        return self._alltoall(call, source, lengths)

    @prepared
    def _alltoall(self, call: Call, source: Array, lengths: Sequence[int]) -> Move[list[Array]]:
        me, head = self.members.me, 8 * self.members.size
        data = as_bytes(np.array(lengths, np.int64))
        if head + source.size <= self._little:
            data = np.concatenate([data, source])
        self._lay(0, data, self._share)
        call.carry = self._carry_gathered(call, self._share)
        yield Offer(data.nbytes)
        parts = yield from self._gather(call, data, None, carried=True)
        table = np.stack([part[:head].view(np.int64) for part in parts])
        # A rank whose data did not fit has sent its lengths only.
        if any(part.size - head != sum(cuts) for part, cuts in zip(parts, table, strict=True)):
            return (yield from self.mpi.exchange(call, source, lengths, table[:, me].tolist()))
        ends = head + np.cumsum(table, 1)[:, me]
        spans = zip(parts, (ends - table[:, me]).tolist(), ends.tolist(), strict=True)
        return [part[low:high] for part, low, high in spans]
