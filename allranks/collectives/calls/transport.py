"""The ways that bytes take between ranks, behind one small interface. Runs in every rank.

A transport is asked for one operation at a time. A call that is not ``posted`` has not been
agreed on: then the transport runs `Group.agree` before any data reaches a user's array, and may
have laid out its own data by then. Every method is a generator that yields while
it waits. Arrays are contiguous; ``out`` never overlaps ``source`` unless it is the same array.

What a transport for GPUs brings: these methods over device arrays, and a place in `choose`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

if TYPE_CHECKING:
    from allranks.collectives.arrays.reductions import Arithmetic
    from allranks.collectives.calls.call import Call
    from allranks.collectives.calls.wait import Steps

Array = NDArray[Any]


class Transport(Protocol):
    """Moves data between the members of one group."""

    name: str

    def allreduce(self, call: Call, source: Array, out: Array, how: Arithmetic) -> Steps[None]:
        """Every member's ``out`` is the reduction of all sources; (n,) and (n,)."""

    def reducescatter(
        self,
        call: Call,
        source: Array,
        bounds: Sequence[int],
        out: Array,
        how: Arithmetic,
    ) -> Steps[None]:
        """``out`` is the elements bounds[me]:bounds[me + 1] of the reduction."""

    def broadcast(self, call: Call, array: Array, root: int) -> Steps[None]:
        """Every member's ``array`` (bytes) is the root's; ``root`` is a member's index."""

    def allgather(
        self,
        call: Call,
        source: Array,
        lengths: list[int] | None = None,
        root: int = -1,
    ) -> Steps[list[Array]]:
        """All sources (bytes, of any length) in order, on every member or on ``root`` only."""

    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Steps[list[Array]]:
        """The pieces (bytes) that the members, or ``root`` only, cut for this one."""
