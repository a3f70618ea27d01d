"""Exchanges on a grid in which one rank is the neighbour on both sides: in a periodic dimension of
one or two ranks.

What a rank sends to its left arrives from the right. Calls of Open MPI 5.0 that do not wait, of
which ours are made, mix up the two; its blocking calls and MPICH do not.
Source: MPI 4.1, section 8.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import index
from typing import Any

import numpy as np
from mpi4py import MPI

from allranks.collectives.ops.bounds import of_each_part, read_parts
from allranks.collectives.ops.buffers import dtype_of


def order_of_parts(grid: MPI.Cartcomm) -> list[int] | None:
    """Returns the order in which the library has to receive parts; None if it is their own."""
    dims, periods, _ = grid.Get_topo()
    narrow = [around and extent <= 2 for extent, around in zip(dims, periods, strict=True)]
    if not any(narrow) or not _mixes_up():
        return None
    return [part ^ 1 if narrow[part // 2] else part for part in range(2 * len(narrow))]


@cache
def _mixes_up() -> bool:
    alone = MPI.Intracomm.Create_cart(MPI.Intracomm(MPI.COMM_SELF), [1], [True])
    got = np.empty(2, np.int8)
    alone.Ineighbor_alltoall(np.array([0, 1], np.int8), got).Wait()
    alone.Free()
    return bool(got[0] == 0)


def with_types(form: str, buffer: Any, order: Sequence[int]) -> list[Any]:
    """Returns the parts of a buffer of ``alltoall``, ``alltoallv`` or ``alltoallw`` in an order, in
    the form of the last one: data, counts, displacements in bytes, types.

    Raises Python's exceptions for a buffer that has none of mpi4py's forms.
    """
    count = len(order)
    if form == "alltoallw":
        data, *rest, kinds = buffer
        counts, begins = rest if len(rest) == 2 else rest[0] if rest else ([1] * count, [0] * count)
    else:
        data, counts, begins, kind = _with_type(form, buffer, count)
        kinds = [kind] * count
    return [data, *([each[part] for part in order] for each in (counts, begins, kinds))]


def _with_type(
    form: str, buffer: Any, ranks: int
) -> tuple[Any, Sequence[int], Sequence[int], MPI.Datatype]:
    data, counts, places, kind = read_parts(buffer)
    kind = kind or MPI.Datatype.fromcode(dtype_of(data).char)
    room = 0 if counts is not None else MPI.buffer.frombuffer(data, True).nbytes // kind.extent
    if form == "alltoall":
        if places is None and isinstance(counts, list):
            counts, places = counts
        first = 0 if places is None else index(places)
        each, more = divmod(room - first, ranks) if counts is None else (index(counts), 0)
        if more:
            raise ValueError(
                f"message: cannot infer count, number of entries {room - first} is not a multiple "
                f"of required number of blocks {ranks}"
            )
        counts, places = [each] * ranks, [first + each * part for part in range(ranks)]
    counts, places = of_each_part(counts, places, room, ranks)
    return data, counts, [place * kind.extent for place in places], kind
