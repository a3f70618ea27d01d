"""Data through MPI, on any number of hosts: non-blocking calls, polled. Runs in every rank.

Source: MPI 4.1, chapter 6, non-blocking collective operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, starmap
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from allranks.collectives.mpi.mpi_types import finish, is_foreign, prepare

if TYPE_CHECKING:
    from allranks.collectives.arrays.reductions import Arithmetic
    from allranks.collectives.calls.call import Call
    from allranks.collectives.calls.wait import Awaited, Steps
    from allranks.collectives.world.group import Group

Array = NDArray[Any]


def complete(
    kept: dict[int, list[Any]],
    awaited: Awaited,
    post: Callable[..., MPI.Request],
    *arguments: object,
    status: MPI.Status | None = None,
) -> Steps[MPI.Request]:
    """Posts one non-blocking call and ends when it has completed.

    ``kept`` holds request and buffers until then, and for ever where the wait is left: MPI may
    still write to them.
    """
    held: list[Any] = [arguments]
    kept[id(held)] = held
    # In one step of the interpreter: an interrupt cannot come between the call and the list.
    held.extend(starmap(post, (arguments,)))
    request: MPI.Request = held[1]
    awaited.stage += 1
    while not request.Test(status):
        yield awaited
    del kept[id(held)]
    return request


class Mpi:
    """Transport over a group's own communicator, which is made when it is first needed."""

    name = "mpi"

    def __init__(self, group: Group, make: Callable[[Awaited], Steps[MPI.Intracomm]]) -> None:
        self.group = group
        self._make = make
        self._comm: MPI.Intracomm | None = None

    def use(self, comm: MPI.Intracomm) -> None:
        """Takes a communicator that has been made already."""
        self._comm = comm

    def comm(self, awaited: Awaited) -> Steps[MPI.Intracomm]:
        """The group's communicator of this epoch. Collective over the group."""
        if self._comm is None:
            self._comm = yield from self._make(awaited)
        return self._comm

    def _agreed(self, call: Call, extent: int) -> Steps[MPI.Intracomm]:
        """The communicator, once all have agreed on the call."""
        if not call.posted:
            yield from self.group.agree(call, extent)
        comm = yield from self.comm(call)
        return comm

    def _do(self, call: Call, post: Callable[..., MPI.Request], *arguments: object) -> Steps[None]:
        yield from complete(self.group.world.kept, call, post, *arguments)

    def allreduce(self, call: Call, source: Array, out: Array, how: Arithmetic) -> Steps[None]:
        """MPI_Iallreduce, where MPI knows the arithmetic."""
        comm = yield from self._agreed(call, source.nbytes)
        if is_foreign(how):
            yield from self._by_all(call, source, slice(None), out, how)
            return
        ready, total, op = prepare(source, out, how)
        yield from self._do(call, comm.Iallreduce, ready, total, op)
        finish(total, out, how)

    def _by_all(
        self, call: Call, source: Array, mine: slice, out: Array, how: Arithmetic
    ) -> Steps[None]:
        """Gathers everybody's values and reduces this rank's part of them here."""
        data = how.prescaled(source).view(np.uint8)
        parts = yield from self.allgather(call, data, [data.nbytes] * self.group.size)
        how.combine([part.view(how.dtype)[mine] for part in parts], out)

    def reducescatter(
        self,
        call: Call,
        source: Array,
        bounds: Sequence[int],
        out: Array,
        how: Arithmetic,
    ) -> Steps[None]:
        """MPI_Ireduce_scatter."""
        comm = yield from self._agreed(call, source.nbytes)
        if is_foreign(how):
            mine = slice(bounds[self.group.me], bounds[self.group.me + 1])
            yield from self._by_all(call, source, mine, out, how)
            return
        ready, total, op = prepare(source, out, how)
        counts = [high - low for low, high in pairwise(bounds)]
        yield from self._do(call, comm.Ireduce_scatter, ready, total, counts, op)
        finish(total, out, how)

    def broadcast(self, call: Call, array: Array, root: int) -> Steps[None]:
        """MPI_Ibcast of bytes."""
        comm = yield from self._agreed(call, array.nbytes)
        yield from self._do(call, comm.Ibcast, array, root)

    def allgather(
        self,
        call: Call,
        source: Array,
        lengths: list[int] | None = None,
        root: int = -1,
    ) -> Steps[list[Array]]:
        """MPI_Iallgatherv, or MPI_Igatherv, of bytes."""
        comm = yield from self._agreed(call, source.nbytes)
        counts = lengths or call.extents
        reads = root in (-1, self.group.me)
        out = np.empty(sum(counts) if reads else 0, np.uint8)
        into = (out, counts, _offsets(counts), MPI.BYTE)
        if root < 0:
            yield from self._do(call, comm.Iallgatherv, source, into)
        else:
            yield from self._do(call, comm.Igatherv, source, into if reads else None, root)
        return _pieces(out, counts) if reads else [out] * len(counts)

    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Steps[list[Array]]:
        """MPI_Ialltoallv, or MPI_Iscatterv, of bytes."""
        comm = yield from self._agreed(call, source.nbytes)
        size, me = self.group.size, self.group.me
        mine = np.array(lengths or [0] * size, np.int64)
        if root >= 0:
            got = np.zeros(1, np.int64)
            yield from self._do(call, comm.Iscatter, mine if me == root else None, got, root)
            out = np.empty(int(got[0]), np.uint8)
            cut = (source, list(lengths), _offsets(lengths), MPI.BYTE)
            yield from self._do(call, comm.Iscatterv, cut if me == root else None, out, root)
            return [out if index == root else out[:0] for index in range(size)]
        theirs = np.empty(size, np.int64)
        yield from self._do(call, comm.Ialltoall, mine, theirs)
        counts = [int(count) for count in theirs]
        out = np.empty(sum(counts), np.uint8)
        send = (source, list(lengths), _offsets(lengths), MPI.BYTE)
        receive = (out, counts, _offsets(counts), MPI.BYTE)
        yield from self._do(call, comm.Ialltoallv, send, receive)
        return _pieces(out, counts)


def _offsets(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]


def _pieces(out: Array, counts: Sequence[int]) -> list[Array]:
    return [
        out[start : start + count] for start, count in zip(_offsets(counts), counts, strict=True)
    ]
