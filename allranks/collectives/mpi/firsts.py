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
        self.rows = [bytearray(self._row_bytes) for _ in self.ranks]
        """What each of them tells; this one's own is written before it is told."""
        others = [index for index in range(len(self.ranks)) if index != self.me]
        self._others = [(index, [self.rows[index], MPI.BYTE]) for index in others]
        self._telling: list[Any] = []
        self._scratch: dict[int, Array] = {}

    def tell(self, nbytes: int) -> None:
        """Begins to send the others so many bytes of this one's row, and to receive theirs."""
        comm, requests = self.comm, list[MPI.Request]()
        held = self._telling = [requests, self.rows]
        self.own.kept[id(held)] = held
        for index, row in self._others:
            requests.append(comm.Irecv(row, index, _TAG))
        mine = [self.rows[self.me], nbytes, MPI.BYTE]
        for index, _ in self._others:
            requests.append(comm.Isend(mine, index, _TAG))

    def told(self) -> bool:
        """Whether all have sent and received: then `rows` are there."""
        held = self._telling
        if held and MPI.Request.Testall(held[0]):
            self._telling = []
            del self.own.kept[id(held)]
        return not self._telling

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
