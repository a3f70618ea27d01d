"""MPI's collectives of buffers as plans, which `comm` makes blocking and posted methods of."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from mpi4py import MPI

from allranks.collectives.ops.buffers import with_in_place
from allranks.features.simulate import buffers

Plan = tuple[Any, Callable[[list[Any]], Any], Callable[[Any], object], int | None]
"""The part of a rank, what is made of all parts, what this rank does with it, and the root."""


def _bytes_of(argument: Any) -> Any:
    return buffers.read(argument).data.copy()


def _fill(argument: Any, data: Any) -> None:
    """Writes bytes to the beginning of a buffer, as MPI does; raises if they do not fit."""
    target = buffers.read(argument).data
    if data.nbytes > target.nbytes:
        raise MPI.Exception(MPI.ERR_TRUNCATE)
    target[: data.nbytes] = data


def _scattered(pieces: list[Any], argument: Any) -> None:
    for target, data in zip(buffers.read(argument).pieces(len(pieces)), pieces, strict=True):
        if data.nbytes > target.nbytes:
            raise MPI.Exception(MPI.ERR_TRUNCATE)
        target[: data.nbytes] = data


def _bcast(comm: Any, buf: Any, root: int = 0) -> Plan:
    # MPI packs, because the datatype may be of any kind.
    mine = buffers.packed(buf) if comm.rank == root else None

    def take(data: Any) -> None:
        if comm.rank != root:
            buffers.unpack(data, buf, MPI.Status())

    return mine, lambda parts: parts[root], take, root


def _gather(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
    here, size = comm.rank == root, comm.size
    if buffers.is_in_place(sendbuf):
        mine = buffers.read(recvbuf).pieces(size)[comm.rank].copy()
    else:
        mine = _bytes_of(sendbuf)
    return mine, list, lambda parts: _scattered(parts, recvbuf) if here else None, root


def _scatter(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
    here, size = comm.rank == root, comm.size
    mine = [one.copy() for one in buffers.read(sendbuf).pieces(size)] if here else None

    def take(pieces: Any) -> None:
        if not buffers.is_in_place(recvbuf):
            _fill(recvbuf, pieces[comm.rank])

    return mine, lambda parts: parts[root], take, root


def _allgather(comm: Any, sendbuf: Any, recvbuf: Any) -> Plan:
    if buffers.is_in_place(sendbuf):
        mine = buffers.read(recvbuf).pieces(comm.size)[comm.rank].copy()
    else:
        mine = _bytes_of(sendbuf)
    return mine, list, lambda parts: _scattered(parts, recvbuf), None


def _alltoall(comm: Any, sendbuf: Any, recvbuf: Any) -> Plan:
    source = recvbuf if buffers.is_in_place(sendbuf) else sendbuf
    mine = [one.copy() for one in buffers.read(source).pieces(comm.size)]

    def take(table: Any) -> None:
        _scattered([row[comm.rank] for row in table], recvbuf)

    return mine, list, take, None


def _own(sendbuf: Any, recvbuf: Any) -> buffers.Buffer:
    return buffers.read(recvbuf if buffers.is_in_place(sendbuf) else sendbuf)


def _reduce(comm: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> Plan:
    here, size, own = comm.rank == root, comm.size, _own(sendbuf, recvbuf)
    order = buffers.order_of_reduce(own.data.nbytes, own.itemsize, size)

    def make(parts: list[Any]) -> Any:
        if order == "tree":
            # Open MPI's tree has the root in the place of the first rank.
            parts = list(parts)
            parts[0], parts[root] = parts[root], parts[0]
        return buffers.combine(parts, own, op, order)

    return own.data.copy(), make, lambda data: _fill(recvbuf, data) if here else None, root


def _allreduce(comm: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Plan:
    sendbuf, recvbuf = with_in_place("Allreduce", (sendbuf, recvbuf), True)
    own = _own(sendbuf, recvbuf)
    order = buffers.order_of_allreduce(own.data.nbytes, own.itemsize, comm.size)
    if buffers.is_in_place(sendbuf):
        order = "tree"
    return (
        own.data.copy(),
        lambda parts: buffers.combine(parts, own, op, order),
        lambda data: _fill(recvbuf, data),
        None,
    )


def _reduce_scatter_block(comm: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Plan:
    own, me, size = _own(sendbuf, recvbuf), comm.rank, comm.size

    def take(data: Any) -> None:
        step = data.nbytes // size
        _fill(recvbuf, data[me * step : (me + 1) * step])

    return own.data.copy(), lambda parts: buffers.combine(parts, own, op, "tree"), take, None


def _reduce_scatter(
    comm: Any, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM
) -> Plan:
    own, me, size = _own(sendbuf, recvbuf), comm.rank, comm.size
    counts = recvcounts
    if counts is None:
        counts = [own.data.nbytes // own.itemsize // size] * size
    starts = list(accumulate(counts, initial=0))

    def take(data: Any) -> None:
        _fill(recvbuf, data[starts[me] * own.itemsize : starts[me + 1] * own.itemsize])

    return own.data.copy(), lambda parts: buffers.combine(parts, own, op, "tree"), take, None


def _scanned(comm: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op, *, inclusive: bool) -> Plan:
    own, me = _own(sendbuf, recvbuf), comm.rank

    def make(parts: list[Any]) -> list[Any]:
        found = [parts[0].copy()]
        for part in parts[1:]:
            found.append(buffers.combine([found[-1], part], own, op))
        return found

    def take(found: Any) -> None:
        if inclusive or me:
            _fill(recvbuf, found[me if inclusive else me - 1])

    return own.data.copy(), make, take, None


def _scan(comm: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Plan:
    return _scanned(comm, sendbuf, recvbuf, op, inclusive=True)


def _exscan(comm: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> Plan:
    return _scanned(comm, sendbuf, recvbuf, op, inclusive=False)


PLANS: dict[str, Callable[..., Plan]] = {
    **{"Bcast": _bcast, "Gather": _gather, "Gatherv": _gather, "Scatter": _scatter},
    **{"Scatterv": _scatter, "Allgather": _allgather, "Allgatherv": _allgather},
    **{"Alltoall": _alltoall, "Alltoallv": _alltoall, "Reduce": _reduce},
    **{"Allreduce": _allreduce, "Reduce_scatter": _reduce_scatter, "Scan": _scan},
    **{"Reduce_scatter_block": _reduce_scatter_block, "Exscan": _exscan},
}
