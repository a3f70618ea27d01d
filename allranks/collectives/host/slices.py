"""Reductions of arrays of at most one block, by slices.

A member copies to its block what the others reduce, and arrives. Then it reduces its slice, which
it reads where its array is, and writes the result to the others' blocks and to its own result.
After another arrival it copies the results of the others from its block. So fewer bytes pass
between the cores than if each member read the blocks of the others as a whole, and results need no
shared memory. When the call ends no other member uses the block any more: the next call takes the
same one, which is in the caches.
"""

from __future__ import annotations

from typing import NamedTuple

from allranks.collectives.arrays.reductions import Arithmetic, Array


class Slices(NamedTuple):
    """The views of the members' blocks that one rank needs for arrays of one dtype and size."""

    size: int
    block: Array
    edges: list[tuple[slice, Array]]
    """What other members reduce: where it is, and this part of the rank's own block."""
    mine: slice
    parts: list[Array]
    """This rank's slice of each member's block."""
    first: Array
    """The one to which the reduction is written."""
    others: list[Array]
    me: int

    @classmethod
    def of(cls, blocks: list[Array], me: int, bounds: tuple[int, int]) -> Slices:
        """The views for the slice ``bounds``; ``blocks`` are those of at least two members."""
        (low, high), own = bounds, blocks[me]
        parts = [block[low:high] for block in blocks]
        # A sum in place takes 0.6 of the time, and only the first two parts may be replaced: they
        # are read before the result is written.
        at = 0 if me else 1
        others = [part for index, part in enumerate(parts) if index not in (me, at)]
        edges = [
            (part, own[part]) for part in (slice(0, low), slice(high, own.size)) if own[part].size
        ]
        return cls(own.size, own, edges, slice(low, high), parts, parts[at], others, me)

    def stage(self, source: Array, reduction: Arithmetic) -> None:
        """Writes this rank's values for the other members."""
        if not reduction.copies:
            reduction.staged(source, self.block)
            return
        for here, part in self.edges:
            part[...] = source[here]

    def reduce(self, source: Array, out: Array, reduction: Arithmetic) -> None:
        """Writes this rank's slice of the reduction to all results; all members have staged."""
        mine, me, parts = self.mine, self.me, self.parts
        if reduction.copies:
            parts = [*parts[:me], source[mine], *parts[me + 1 :]]
        reduction.combine(parts, self.first)
        for other in self.others:
            other[...] = self.first
        out[mine] = self.first

    def take(self, out: Array) -> None:
        """Copies the slices that other members have reduced; all of them have."""
        for here, part in self.edges:
            out[here] = part
