"""The first ranks of several hosts: what they tell each other on behalf of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.wait import Steps
from allranks.collectives.mpi.transport import complete, offsets

_TAG, _DATA_TAG = 11, 12
_PIECE_BYTES = 48 << 10
"""MPI sends as much at once, and asks before it sends more. Between two hosts that send each other
all the time, question and answer would each wait behind the other's data."""
_LENGTH_BYTES = 8


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
        whole = [memoryview(bytearray(_LENGTH_BYTES + self._row_bytes)) for _ in self.ranks]
        self.rows = [row[_LENGTH_BYTES:] for row in whole]
        """What each of them tells; this one's own is written before it is told."""
        self._whole = whole
        self._lengths = [row[:_LENGTH_BYTES].cast("q") for row in whole]
        self._others = [index for index in range(len(self.ranks)) if index != self.me]
        self._begins = [(index, [whole[index][:_PIECE_BYTES], MPI.BYTE]) for index in self._others]
        self._telling: list[Any] = []
        self._scratch: dict[tuple[str, int], Array] = {}

    def tell(self, nbytes: int) -> None:
        """Begins to send the others so many bytes of this one's row, and to receive theirs."""
        comm, coming, going = self.comm, list[MPI.Request](), list[MPI.Request]()
        held = self._telling = [coming, going, self._whole]
        self.own.kept[id(held)] = held
        length = self._lengths[self.me][0] = _LENGTH_BYTES + nbytes
        for index, begin in self._begins:
            coming.append(comm.Irecv(begin, index, _TAG))
        for piece in _pieces(self._whole[self.me], 0, length):
            for index in self._others:
                going.append(comm.Isend(piece, index, _TAG))

    def told(self) -> bool:
        """Whether all have sent and received: then `rows` are there."""
        held = self._telling
        if not held:
            return True
        coming, going, _ = held
        if not MPI.Request.Testall(coming):
            return False
        if len(coming) == len(self._others):
            # How much of each comes stands where it begins.
            for index in self._others:
                rest = _pieces(self._whole[index], _PIECE_BYTES, self._lengths[index][0])
                coming.extend(self.comm.Irecv(piece, index, _TAG) for piece in rest)
        if not (MPI.Request.Testall(coming) and MPI.Request.Testall(going)):
            return False
        self._telling = []
        del self.own.kept[id(held)]
        return True

    def gather(self, call: Call, mine: Array, counts: Sequence[int], turn: int = 0) -> Steps[Array]:
        """The bytes of all of them, one after the other; of two such calls at a time, the turn."""
        into, parts = self._room("gathered", turn, np.dtype(np.uint8), counts)
        parts[self.me][...] = mine
        yield from self._swap(call, dict.fromkeys(self._others, mine), parts, turn)
        return into

    def alltoall(
        self, call: Call, mine: Array, counts: Sequence[int], theirs: Sequence[int], turn: int
    ) -> Steps[Array]:
        """The bytes that each of them has for this one: ``theirs``; it has ``counts`` for them."""
        into, parts = self._room("brought", turn, np.dtype(np.uint8), theirs)
        out = _cut(mine, counts)
        parts[self.me][...] = out[self.me]
        yield from self._swap(call, out, parts, turn)
        return into

    def broadcast(self, call: Call, array: Array, root: int) -> Steps[None]:
        """These bytes are the root's on all of them."""
        yield from complete(self.own.kept, call, self.comm.Ibcast, [array, MPI.BYTE], root)

    def reduce(self, call: Call, total: Array, how: Arithmetic, turn: int) -> Steps[Array]:
        """What their totals come to, the same bits on each; it may be in ``total``.

        Two swap what they have. More reduce a part each, and swap the results: MPI's own reduction
        sends everything to one of them and back.
        """
        many = len(self.ranks)
        parts = [total] * many if many == 2 else np.array_split(total, many)
        mine = parts[self.me]
        _, brought = self._room("brought", turn, total.dtype, [mine.size] * many)
        yield from self._swap(call, parts, brought, turn)
        brought[self.me] = mine
        merged = how.merged(brought, brought[0])
        if many == 2:
            return merged
        mine[...] = merged
        yield from self._swap(call, dict.fromkeys(self._others, mine), parts, 2 + turn)
        return total

    def _swap(
        self,
        call: Call,
        out: Sequence[Array] | Mapping[int, Array],
        into: Sequence[Array],
        turn: int,
    ) -> Steps[None]:
        """Sends each of the others its array, and ends when theirs are there as well."""
        comm, tag, requests = self.comm, _DATA_TAG + turn, list[MPI.Request]()
        held: list[Any] = [requests, out, into]
        self.own.kept[id(held)] = held
        for index in self._others:
            for piece in _pieces(into[index], 0, into[index].nbytes):
                requests.append(comm.Irecv(piece, index, tag))
        for index in self._others:
            for piece in _pieces(out[index], 0, out[index].nbytes):
                requests.append(comm.Isend(piece, index, tag))
        call.stage += 1
        while not MPI.Request.Testall(requests):
            yield call
        del self.own.kept[id(held)]

    def scratch(self, turn: int, dtype: np.dtype[Any], count: int) -> Array:
        """Memory of this epoch for what MPI reads or writes, which is used again by turns."""
        return self._memory("own", turn, dtype, count)

    def _room(
        self, what: str, turn: int, dtype: np.dtype[Any], counts: Sequence[int]
    ) -> tuple[Array, list[Array]]:
        """Such memory for something of each of them, whole and cut."""
        whole = self._memory(what, turn, dtype, sum(counts))
        return whole, _cut(whole, counts)

    def _memory(self, what: str, turn: int, dtype: np.dtype[Any], count: int) -> Array:
        nbytes, key = dtype.itemsize * count, (what, turn)
        known = self._scratch.get(key)
        if known is None or known.nbytes < nbytes:
            known = self._scratch[key] = np.empty(nbytes, np.uint8)
        return known[:nbytes].view(dtype)


def _cut(whole: Array, counts: Sequence[int]) -> list[Array]:
    ends = [*offsets(counts), sum(counts)]
    return [whole[low:high] for low, high in pairwise(ends)]


def _pieces(data: Array | memoryview, low: int, high: int) -> Iterator[list[Any]]:
    """The bytes between two places, as MPI takes them, a piece at a time."""
    if isinstance(data, np.ndarray):
        data = data.view(np.uint8)
    for start in range(low, high, _PIECE_BYTES):
        yield [data[start : min(start + _PIECE_BYTES, high)], MPI.BYTE]
