"""What members of several hosts cut for each other: one message for each pair of hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.wait import Steps
from allranks.collectives.mpi.chunks import Chunks, passed
from allranks.collectives.mpi.several import Several

Table = NDArray[np.int64]
"""How many bytes go from each member (a row) to each member."""


def overlaps(lengths: Sequence[int], low: int, high: int) -> Iterator[tuple[int, slice, slice]]:
    """Of pieces one after the other those that reach into ``low:high``: which, what of it, where.

    The last is counted from ``low``.
    """
    at = 0
    for index, length in enumerate(lengths):
        first, last = max(at, low), min(at + length, high)
        if first < last:
            yield index, slice(first - at, last - at), slice(first - low, last - low)
        at += length


def exchanged(several: Several, call: Call, source: Array, table: Table) -> Steps[list[Array]]:
    """The pieces that each member has cut for this one; all know the table."""
    channel, firsts, slots = several.channel, several.firsts, several.desk.slots
    places, me, host = several.places, several.members.me, several.host
    here, mine = places[host], table[me].tolist()
    outs: list[Array] = [np.empty(size, np.uint8) for size in table[:, me].tolist()]
    starts = np.cumsum([0, *mine]).tolist()
    # One stream from each member to each host, of which so many bytes are in a chunk at most.
    streams = np.stack([table[:, ranks].sum(1) for ranks in places], 1)
    most = max((streams > 0).sum(0).max(), (streams > 0).sum(1).max(), 1)
    step = max(1, several.block // int(most))

    def sizes(chunk: int) -> Table:
        found: Table = np.clip(streams - chunk * step, 0, step)
        return found

    def fill(chunk: int) -> None:
        block, at = several.mine(chunk, source.dtype), 0
        for ranks, size in zip(places, sizes(chunk)[me].tolist(), strict=True):
            pieces = overlaps([mine[b] for b in ranks], chunk * step, (chunk + 1) * step)
            for index, piece, where in pieces:
                block[at:][where] = source[starts[ranks[index]] :][piece]
            at += size

    def post(chunk: int) -> Steps[None]:
        told = sizes(chunk)
        ends = np.cumsum(told[here], 1)
        parts = [
            channel.blocks[index][chunk & 1][end - size : end]
            for to in range(len(places))
            for index, (end, size) in enumerate(
                zip(ends[:, to].tolist(), told[here, to].tolist(), strict=True)
            )
        ]
        sent = told[here].sum(0).tolist()
        coming = [int(told[ranks, host].sum()) for ranks in places]
        whole = yield from firsts.alltoall(call, np.concatenate(parts), sent, coming)
        slots[chunk & 1][: whole.size] = whole

    def take(chunk: int) -> None:
        slot, at = slots[chunk & 1], 0
        told = sizes(chunk)[:, host].tolist()
        for member in several.order:
            pieces = overlaps(table[member, here].tolist(), chunk * step, (chunk + 1) * step)
            for index, piece, where in pieces:
                if here[index] == me:
                    outs[member][piece] = slot[at:][where]
            at += told[member]

    fill(0)
    yield from several.meet(call)
    chunks = Chunks(-(-int(streams.max()) // step), fill, post, take)
    return (yield from passed(several, call, chunks, outs))
