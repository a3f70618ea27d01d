"""mpi4py's buffer arguments: packed by MPI for messages, as bytes and counts for collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allranks.collectives.arrays.reductions import Array

_Raw = MPI.Intracomm
_own: list[MPI.Intracomm] = []


def _alone() -> MPI.Intracomm:
    # MPI packs and unpacks: a message of this process to itself, on a communicator of its own.
    if not _own:
        _own.append(_Raw(_Raw.Dup(_Raw(MPI.COMM_SELF))))
    return _own[0]


def packed(buffer: Any) -> bytearray:
    """The content of a buffer argument, of any datatype."""
    comm, status = _alone(), MPI.Status()
    request = _Raw.Isend(comm, buffer, 0, 0)
    while (message := _Raw.Improbe(comm, 0, 0, status)) is None:
        pass
    data = bytearray(status.Get_count(MPI.BYTE))
    message.Recv([data, MPI.BYTE])
    request.Wait()
    return data


def unpack(data: Any, buffer: Any, status: MPI.Status) -> None:
    """Fills a buffer argument; raises MPI's error if it is too small."""
    comm = _alone()
    request = _Raw.Isend(comm, [data, MPI.BYTE], 0, 0)
    try:
        _Raw.Recv(comm, buffer, 0, 0, status)
    finally:
        request.Wait()


class Buffer(NamedTuple):
    """A contiguous buffer argument of a collective."""

    data: Array
    """Its bytes."""
    datatype: MPI.Datatype
    itemsize: int
    counts: list[int] | None
    """Of a vector buffer: one number for each rank."""
    starts: list[int] | None

    def pieces(self, size: int) -> list[Array]:
        """Its parts for, or of, a number of ranks."""
        counts = self.counts
        if counts is None:
            counts = [self.data.nbytes // self.itemsize // size] * size
        starts = self.starts or list(accumulate(counts, initial=0))
        step = self.itemsize
        return [
            self.data[start * step : (start + count) * step]
            for start, count in zip(starts, counts, strict=False)
        ]


def is_in_place(buffer: Any) -> bool:
    return buffer is MPI.IN_PLACE or (type(buffer) is type(MPI.IN_PLACE) and buffer == MPI.IN_PLACE)


def read(argument: Any) -> Buffer:
    """Reads a buffer argument: an array, or ``[array, count or (counts, starts), datatype]``."""
    given, rest = argument, list[Any]()
    if isinstance(argument, list | tuple):
        given, *rest = argument
    array = np.asarray(memoryview(given) if not hasattr(given, "dtype") else given)
    if not array.flags.c_contiguous:
        if not array.flags.f_contiguous:
            raise BufferError("expected a contiguous array. Pass numpy.ascontiguousarray(x)")
        array = array.T
    datatype = None
    if rest and isinstance(rest[-1], MPI.Datatype | str):
        datatype = rest.pop()
        if isinstance(datatype, str):
            datatype = MPI.Datatype.fromcode(datatype)
    if datatype is None:
        is_bytes = isinstance(given, bytes | bytearray)
        datatype = MPI.BYTE if is_bytes else MPI.Datatype.fromcode(array.dtype.char)
    data = array.reshape(-1).view(np.uint8)
    itemsize = datatype.Get_size()
    counts, starts = (rest[0] if rest else None), (rest[1] if len(rest) > 1 else None)
    if isinstance(counts, tuple) and len(counts) == 2 and not isinstance(counts[0], int):
        counts, starts = counts
    if counts is not None and np.ndim(counts) == 0:
        return Buffer(data[: int(counts) * itemsize], datatype, itemsize, None, None)
    return Buffer(data, datatype, itemsize, _numbers(counts), _numbers(starts))


def _numbers(values: Any) -> list[int] | None:
    return None if values is None else [int(value) for value in values]


_LARGE_NBYTES = 65536


def combine(parts: Sequence[Array], like: Buffer, op: MPI.Op, order: str = "ranks") -> Array:
    """Reduces the ranks' bytes with MPI's own operation, pair by pair.

    The ``order`` is that of Open MPI's non-blocking calls, so that sums of floats have the same
    bits: ``ranks`` one after the other, ``tree``, or ``halves``, where ranks beyond a power of two
    are added to their neighbours first.
    """
    values = [part.copy() for part in parts]

    def add(into: int, other: int) -> None:
        # MPI's function computes other = into op other: the lower rank is the left operand.
        count = values[into].nbytes // like.itemsize
        left, right = [values[into], count, like.datatype], [values[other], count, like.datatype]
        op.Reduce_local(left, right)
        values[into] = values[other]

    if order == "ranks" or not op.Is_commutative():
        for other in range(1, len(values)):
            add(0, other)
        return values[0]
    if order == "halves":
        power = 1 << (len(values).bit_length() - 1)
        extra = len(values) - power
        for at in range(extra):
            add(2 * at, 2 * at + 1)
        values = [values[2 * at] for at in range(extra)] + values[2 * extra :]
    step = 1
    while step < len(values):
        for at in range(0, len(values) - step, 2 * step):
            add(at, at + step)
        step *= 2
    return values[0]


def order_of_allreduce(nbytes: int, itemsize: int, size: int) -> str:
    """Source: Open MPI 5.0, ompi/mca/coll/libnbc/nbc_iallreduce.c."""
    power = 1 << (size.bit_length() - 1)
    large = size >= 4 and nbytes >= _LARGE_NBYTES and nbytes // itemsize >= power
    return "halves" if large else "tree"


def order_of_reduce(nbytes: int, itemsize: int, size: int) -> str:
    """Source: Open MPI 5.0, ompi/mca/coll/libnbc/nbc_ireduce.c."""
    power = 1 << (size.bit_length() - 1)
    return "halves" if size > 2 and nbytes // itemsize >= power else "tree"


Make = Callable[[list[Any]], Any]
