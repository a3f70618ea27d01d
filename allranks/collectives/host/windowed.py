"""allreduce where the arrays lie: nobody copies to send.

Each member reduces its slice over all members' windows and writes the result to all of them, so
that the memory is read once and written once. Arrays that are not in the window are copied
there, chunk by chunk, into what becomes the result; a chunk is reduced while it is in the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import Members, Place
from allranks.collectives.host.window import WARM_BYTES, Window

CHUNK_BYTES = 2 << 20
BLOCK_BYTES = 256 << 10
"""What one numpy call works on, so that sums stay in the caches until they are written."""


class Block(NamedTuple):
    """A part of this rank's slice."""

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
) -> list[list[Block]]:
    """For each chunk what this rank has to reduce, as views of all members' windows."""
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


def _slice(sources: list[Array], outs: list[Array], me: int, start: int, end: int) -> list[Block]:
    members, count, found = len(outs), end - start, []
    low, high = start + count * me // members, start + count * (me + 1) // members
    step = BLOCK_BYTES // outs[0].itemsize
    for at in range(low, high, step):
        here = slice(at, min(high, at + step))
        others = [out[here] for index, out in enumerate(outs) if index != me]
        # This rank's own comes first: where it is the output too, the first sum replaces it.
        order = [me, *(index for index in range(len(outs)) if index != me)]
        found.append(Block([sources[index][here] for index in order], outs[me][here], others))
    return found


def reduce_blocks(found: list[Block], how: Arithmetic) -> None:
    """Reduces one chunk's blocks and writes them to every member's output."""
    for parts, mine, others in found:
        how.combine(parts, mine)
        for other in others:
            other[...] = mine


def chunk(dtype: np.dtype[Any]) -> int:
    """Elements that are copied before they are reduced."""
    return CHUNK_BYTES // dtype.itemsize


def straight_bytes(members: int, block: int) -> int:
    """Up to how many bytes it is faster that every member reduces everything, through blocks.

    That takes one arrival instead of two, for members − 1 times the arithmetic. Larger results
    live in the windows, where they can be written by all.
    """
    return min(block, WARM_BYTES, CHUNK_BYTES // 2 // max(1, members - 1))
