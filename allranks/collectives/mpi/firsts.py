"""The first ranks of several hosts: what they tell each other on behalf of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.wait import Steps
from allranks.collectives.mpi.mpi_types import in_place
from allranks.collectives.mpi.transport import complete, offsets

_TAG = 11


class Firsts:
    """A communicator of the first rank of each host, on those ranks, of each epoch.

    What MPI may still write to after a call has been left is used in no later epoch.

    Args:
        own: the rank that it is of.
        ranks: the first ranks of the hosts, in the hosts' order.
        number: the group's.
        user: the communicator of all ranks, which stands for each epoch's in turn.
        row_bytes: as much as one of them tells at most.
    """

    def __init__(
        self,
        own: Standing,
        ranks: tuple[int, ...],
        number: int,
        user: MPI.Intracomm,
        row_bytes: int,
    ) -> None:
        self.own, self.ranks = own, ranks
        self._user, self._tag = user, number
        self._row_bytes = row_bytes

    def renew(self) -> None:
        """A new epoch has begun. Collective over these ranks, which are certain to come."""
        if self.own.rank not in self.ranks:
            return
        group = self._user.Get_group().Incl(list(self.ranks))
        self.comm = MPI.Intracomm(self._user).Create_group(group, (1 << 22) + self._tag)
        self.me = self.comm.Get_rank()
        others = [index for index in range(len(self.ranks)) if index != self.me]
        self._rows = [(index, (bytearray(self._row_bytes), MPI.BYTE)) for index in others]
        self._statuses = [MPI.Status() for _ in 2 * others]
        self._scratch: dict[int, Array] = {}

    def exchange(self, call: Call, row: bytes) -> Steps[list[memoryview]]:
        """What each of them tells, in their order; it may be of any length up to the most."""
        comm, kept = self.comm, self.own.kept
        requests: list[MPI.Request] = []
        held = [requests, row]
        kept[id(held)] = held
        for index, into in self._rows:
            requests.append(comm.Irecv(into, index, _TAG))
        end = (row, MPI.BYTE)
        for index, _ in self._rows:
            requests.append(comm.Isend(end, index, _TAG))
        statuses = self._statuses
        call.stage += 1
        while not MPI.Request.Testall(requests, statuses):
            yield call
        del kept[id(held)]
        found = [
            memoryview(into[0])[: status.Get_count(MPI.BYTE)]
            for (_, into), status in zip(self._rows, statuses, strict=False)
        ]
        found.insert(self.me, memoryview(row))
        return found

    def gather(self, call: Call, mine: Array, counts: Sequence[int]) -> Steps[Array]:
        """The bytes of all of them, one after the other."""
        into = np.empty(sum(counts), np.uint8)
        end = (into, list(counts), offsets(counts), MPI.BYTE)
        yield from complete(self.own.kept, call, self.comm.Iallgatherv, [mine, MPI.BYTE], end)
        return into

    def alltoall(
        self, call: Call, mine: Array, counts: Sequence[int], theirs: Sequence[int]
    ) -> Steps[Array]:
        """The bytes that each of them has for this one: ``theirs``; it has ``counts`` for them."""
        into = np.empty(sum(theirs), np.uint8)
        send = (mine, list(counts), offsets(counts), MPI.BYTE)
        end = (into, list(theirs), offsets(theirs), MPI.BYTE)
        yield from complete(self.own.kept, call, self.comm.Ialltoallv, send, end)
        return into

    def broadcast(self, call: Call, array: Array, root: int) -> Steps[None]:
        """These bytes are the root's on all of them."""
        yield from complete(self.own.kept, call, self.comm.Ibcast, [array, MPI.BYTE], root)

    def reduce(self, call: Call, total: Array, how: Arithmetic) -> Steps[Array]:
        """What their totals come to, the same bits on each; it may be in ``total``."""
        found = in_place(total, how)
        if found is not None:
            buffer, op = found
            yield from complete(self.own.kept, call, self.comm.Iallreduce, MPI.IN_PLACE, buffer, op)
            return total
        data = total.view(np.uint8).reshape(-1)
        counts = [data.nbytes] * len(self.ranks)
        every = (yield from self.gather(call, data, counts)).view(total.dtype)
        return how.merged(list(every.reshape(len(self.ranks), -1)))

    def scratch(self, turn: int, dtype: np.dtype[Any], count: int) -> Array:
        """Memory of this epoch for what MPI writes, which is used again by turns."""
        nbytes = dtype.itemsize * count
        known = self._scratch.get(turn)
        if known is None or known.nbytes < nbytes:
            known = self._scratch[turn] = np.empty(nbytes, np.uint8)
        return known[:nbytes].view(dtype)
