"""Reductions of large arrays outside the shared memory, chunk by chunk through staging buffers.

Each member has a buffer of two halves in its window. For each chunk, a member copies its values to
one half and arrives; then it reduces its slice over all members' halves, and writes the result to
its array and to the halves of the others. While others do so, it copies the results of the chunk
before, and its values of the next one, with the other half: so a chunk takes one arrival. With
fewer, larger chunks ranks wait less often for each other, but the buffers leave the caches.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import NOWHERE, Agreement, Call, Place, Steps
from allranks.collectives.host.memory import Window, in_staging, staging_of

HALF_BYTES = 1 << 20
BLOCK_BYTES = 256 << 10
"""One numpy call works on this many bytes, so that sums stay in the caches."""
Halves = list[tuple[Array, Array]]
"""Both halves of each member's buffer."""


class StagingBuffer:
    """This rank's staging buffer, which is allocated when it is first used."""

    def __init__(self, agreement: Agreement, window: Window | None) -> None:
        self._agreement, self._members, self._window = agreement, agreement.members, window
        self._own: Array | None = None

    def stage(self, index: int, source: Array, reduction: Arithmetic) -> Place:
        """Copies a chunk of this rank's values to the buffer, and returns its place, which is
        `NOWHERE` if there is no memory for it.
        """
        window = self._window
        if self._own is None and window is not None:
            self._own = window.empty((2 * HALF_BYTES,), np.dtype(np.uint8), 2 * HALF_BYTES)
        if self._own is None or window is None:
            return NOWHERE
        # Halves by turns: others may still read the chunk before.
        part = _chunk(source, index)
        half = self._own[(index & 1) * HALF_BYTES :][: part.nbytes].view(part.dtype)
        if self._reads_source(reduction):
            low, high = self._slice(part.size)
            np.copyto(half[:low], part[:low])
            np.copyto(half[high:], part[high:])
        else:
            reduction.staged(part, half)
        return in_staging(window.place_of(self._own))

    def halves(self, places: list[Place], dtype: np.dtype[np.generic]) -> Halves | None:
        """The buffers at the places that the members offered; None if one has no buffer."""
        known = [staging_of(where) for where in places]
        if self._window is None or 0 in [segment for segment, _ in known]:
            return None
        found = []
        for rank, at in zip(self._members.ranks, known, strict=True):
            buffer = self._window.at(rank, *at, 2 * HALF_BYTES)
            found.append((buffer[:HALF_BYTES].view(dtype), buffer[HALF_BYTES:].view(dtype)))
        return found

    def reduce(
        self, call: Call, source: Array, out: Array, reduction: Arithmetic, halves: Halves
    ) -> Steps[None]:
        """Writes the reduction of all sources to ``out``, which may be ``source``. The first chunk
        has been staged, and all members have agreed.
        """
        me, block = self._members.me, BLOCK_BYTES // source.dtype.itemsize
        chunks = -(-source.nbytes // HALF_BYTES)
        for index in range(chunks):
            given, into = _chunk(source, index), _chunk(out, index)
            parts = [pair[index & 1][: into.size] for pair in halves]
            others = [part for member, part in enumerate(parts) if member != me]
            if self._reads_source(reduction):
                parts[me] = given
            start, end = self._slice(into.size)
            for low in range(start, end, block):
                here = slice(low, min(low + block, end))
                # In the order of the members, as smaller arrays are reduced in blocks.
                reduction.combine([part[here] for part in parts], into[here])
                for other in others:
                    np.copyto(other[here], into[here])
            # The other half: all members have written to it before the last barrier.
            if index:
                self._take(index - 1, out)
            if index + 1 < chunks:
                self.stage(index + 1, source, reduction)
            yield from self._agreement.barrier(call)
        self._take(chunks - 1, out)

    def _take(self, index: int, out: Array) -> None:
        """Copies the slices of a chunk that other members have reduced."""
        into = _chunk(out, index)
        assert self._own is not None
        half = self._own[(index & 1) * HALF_BYTES :][: into.nbytes].view(into.dtype)
        low, high = self._slice(into.size)
        np.copyto(into[:low], half[:low])
        np.copyto(into[high:], half[high:])

    def _slice(self, count: int) -> tuple[int, int]:
        """The bounds of the slice of a chunk that this rank reduces."""
        return list(pairwise(split(count, self._members.size)))[self._members.me]

    def _reads_source(self, reduction: Arithmetic) -> bool:
        # The first two parts are read before the result, which may replace one, is written.
        return reduction.copies and self._members.me < 2


def split(count: int, members: int) -> list[int]:
    """Bounds of ``members`` slices of ``count`` elements, as equal as possible, longest first."""
    each, rest = divmod(count, members)
    return [index * each + min(index, rest) for index in range(members + 1)]


def _chunk(array: Array, index: int) -> Array:
    step = HALF_BYTES // array.dtype.itemsize
    return array[index * step :][:step]
