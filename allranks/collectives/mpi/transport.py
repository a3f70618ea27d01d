"""Data through MPI, on any number of hosts: non-blocking calls, polled.

Source: MPI 4.1, chapter 6, non-blocking collective operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, starmap
from typing import Any

import numpy as np
from mpi4py import MPI

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import Call, Members, Move, Offer, prepared
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.transport import cut
from allranks.collectives.calls.wait import Awaited, Steps
from allranks.collectives.mpi.mpi_types import finish, is_foreign, prepare
from allranks.records.deferred import deferred

_CREATE_TAG = 29


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
    try:
        # In one step of the interpreter: an interrupt cannot come between the call and the list.
        held.extend(starmap(post, (arguments,)))
        request: MPI.Request = held[1]
        awaited.stage += 1
        while not request.Test(status):
            yield awaited
    except MPI.Exception:
        del kept[id(held)]
        raise
    del kept[id(held)]
    return request


class Mpi:
    """Transport over a group's own communicator, which is made when it is first needed.

    ``now``, it is made at once: all members are here, and stay. Those that share no memory could
    not wait for each other later on, before it is there. ``user`` stands for each epoch's
    communicator of all ranks in turn.
    """

    name = "mpi"

    def __init__(self, own: Standing, members: Members, user: MPI.Intracomm, *, now: bool) -> None:
        self.own, self.members = own, members
        self._user, self._now = user, now
        self._is_world = members.ranks == tuple(range(own.size))
        self.renew()

    def renew(self) -> None:
        """A new epoch has begun, with other communicators."""
        self._comm = self._create() if self._now and not self._is_world else None

    def _create(self) -> MPI.Intracomm:
        """There is no non-blocking call for this: it is made when all members are certain to."""
        ranks = self._user.Get_group().Incl(list(self.members.ranks))
        return MPI.Intracomm(self._user).Create_group(ranks, _CREATE_TAG + self.members.number)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array."""
        return np.empty(shape, dtype)

    def comm(self, awaited: Awaited) -> Steps[MPI.Intracomm]:
        """The group's communicator of this epoch. Collective over the group, which has arrived."""
        if self._comm is None and self._is_world:
            comm, request = MPI.Intracomm(self._user).Idup()
            while not request.Test():
                yield awaited
            self._comm = comm
        elif self._comm is None:
            with deferred():
                self._comm = self._create()
        return self._comm

    def _do(self, call: Call, post: Callable[..., MPI.Request], *arguments: object) -> Steps[None]:
        yield from complete(self.own.kept, call, post, *arguments)

    @prepared
    def allreduce(
        self, call: Call, source: Array, how: Arithmetic, out: Array | None = None
    ) -> Move[Array]:
        """MPI_Iallreduce, where MPI knows the arithmetic."""
        found = np.empty(source.shape, source.dtype) if out is None else out
        into = found.reshape(-1)
        flat = into if source is found else source.reshape(-1)
        yield Offer(source.nbytes)
        comm = yield from self.comm(call)
        if is_foreign(how):
            yield from self._by_all(call, flat, slice(None), into, how)
        else:
            ready, total, op = prepare(flat, into, how)
            yield from self._do(call, comm.Iallreduce, ready, total, op)
            finish(total, into, how)
        return found

    def _by_all(
        self, call: Call, source: Array, mine: slice, out: Array, how: Arithmetic
    ) -> Steps[None]:
        """Gathers everybody's values and reduces this rank's part of them here."""
        data = how.prescaled(source).view(np.uint8)
        parts = yield from self.gather(call, data, [data.nbytes] * self.members.size)
        how.combine([part.view(how.dtype)[mine] for part in parts], out)

    @prepared
    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, how: Arithmetic
    ) -> Move[None]:
        """MPI_Ireduce_scatter."""
        yield Offer(source.nbytes)
        comm = yield from self.comm(call)
        if is_foreign(how):
            mine = slice(bounds[self.members.me], bounds[self.members.me + 1])
            yield from self._by_all(call, source, mine, out, how)
            return
        ready, total, op = prepare(source, out, how)
        counts = [high - low for low, high in pairwise(bounds)]
        yield from self._do(call, comm.Ireduce_scatter, ready, total, counts, op)
        finish(total, out, how)

    @prepared
    def broadcast(self, call: Call, array: Array, root: int) -> Move[None]:
        """MPI_Ibcast of bytes."""
        yield Offer(array.nbytes)
        comm = yield from self.comm(call)
        yield from self._do(call, comm.Ibcast, array, root)

    @prepared
    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Move[list[Array]]:
        """MPI_Iallgatherv, or MPI_Igatherv, of bytes."""
        yield Offer(source.nbytes)
        sizes = lengths or [offer.nbytes for offer in call.agreement.offers(call)]
        return (yield from self.gather(call, source, sizes, root))

    def gather(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Steps[list[Array]]:
        """The same, once all have agreed and know the lengths."""
        comm = yield from self.comm(call)
        counts = list(lengths)
        reads = root in (-1, self.members.me)
        out = np.empty(sum(counts) if reads else 0, np.uint8)
        into = (out, counts, offsets(counts), MPI.BYTE)
        if root < 0:
            yield from self._do(call, comm.Iallgatherv, source, into)
        else:
            yield from self._do(call, comm.Igatherv, source, into if reads else None, root)
        return cut(out, counts) if reads else [out] * len(counts)

    @prepared
    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Move[list[Array]]:
        """MPI_Ialltoallv, or MPI_Iscatterv, of bytes."""
        yield Offer(source.nbytes)
        comm = yield from self.comm(call)
        size, me = self.members.size, self.members.me
        mine = np.array(lengths or [0] * size, np.int64)
        if root >= 0:
            got = np.zeros(1, np.int64)
            yield from self._do(call, comm.Iscatter, mine if me == root else None, got, root)
            out = np.empty(int(got[0]), np.uint8)
            pieces = (source, list(lengths), offsets(lengths), MPI.BYTE)
            yield from self._do(call, comm.Iscatterv, pieces if me == root else None, out, root)
            return [out if index == root else out[:0] for index in range(size)]
        theirs = np.empty(size, np.int64)
        yield from self._do(call, comm.Ialltoall, mine, theirs)
        return (yield from self.exchange(call, source, lengths, theirs.tolist()))

    def exchange(
        self, call: Call, source: Array, lengths: Sequence[int], theirs: Sequence[int]
    ) -> Steps[list[Array]]:
        """MPI_Ialltoallv, once all have agreed and know how much is for them."""
        comm = yield from self.comm(call)
        counts, out = list(theirs), np.empty(sum(theirs), np.uint8)
        send = (source, list(lengths), offsets(lengths), MPI.BYTE)
        receive = (out, counts, offsets(counts), MPI.BYTE)
        yield from self._do(call, comm.Ialltoallv, send, receive)
        return cut(out, counts)


def offsets(counts: Sequence[int]) -> list[int]:
    """Where pieces of these lengths begin that lie one after the other."""
    return list(accumulate(counts, initial=0))[:-1]
