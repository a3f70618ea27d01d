"""The ways that bytes take between ranks, behind one small interface.

A transport prepares one move at a time: it lays out what others will read, says what it offers, and
returns the rest, which `Call.moved` sees to once all members have agreed. Arrays are
contiguous; ``out`` never overlaps ``source`` unless it is the same array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import Call, Prepared


class Transport(Protocol):
    """Moves data between the members of one group."""

    name: str

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array for a result, where this transport writes it fastest."""

    def allreduce(
        self, call: Call, source: Array, how: Arithmetic, out: Array | None = None
    ) -> Prepared[Array]:
        """The reduction of all sources, of any shape; in ``out``, or in a new array."""

    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, how: Arithmetic
    ) -> Prepared[None]:
        """``out`` is the elements bounds[me]:bounds[me + 1] of the reduction."""

    def broadcast(self, call: Call, array: Array, root: int) -> Prepared[None]:
        """Every member's ``array`` (bytes) is the root's; ``root`` is a member's index."""

    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Prepared[list[Array]]:
        """All sources (bytes) in order, on every member or on ``root`` only.

        ``lengths`` is what the members bring; what they have offered where it is None.
        """

    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Prepared[list[Array]]:
        """The pieces (bytes) that the members, or ``root`` only, cut for this one."""

    def renew(self) -> None:
        """A new epoch has begun."""


def as_bytes(array: Any) -> Any:
    """The same memory as bytes, one after the other."""
    return array.reshape(-1).view(np.uint8)


class Cut(list[Any]):
    """Pieces that lie one after the other, and the array that they make up."""

    def __init__(self, whole: Any, pieces: Iterable[Any]) -> None:
        super().__init__(pieces)
        self.whole = whole


def cut(array: Any, lengths: Sequence[int]) -> Cut:
    """Views of an array's pieces, one after the other; their lengths add up to its own."""
    bounds = accumulate(lengths, initial=0)
    return Cut(array, [array[low:high] for low, high in pairwise(bounds)])
