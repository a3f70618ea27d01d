"""send and recv of arrays."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.arrays.libraries import ArrayHeader, to_dtype, to_numpy
from allranks.collectives.arrays.reductions import ReduceOp, check, name_of
from allranks.collectives.calls.call import PointCall, Steps
from allranks.collectives.calls.guard import Spec
from allranks.collectives.world import World
from allranks.errors import UsageError

_TAGS = 1 << 14
"""Added to the tags, so that receives of any tag on `comm` do not match these messages."""
_HEAD_BYTES = 256


def send(array: Any, dest: int, tag: int = 0, *, name: str | None = None) -> None:
    """One rank's array goes to another, which calls `recv`.

    Ends when the array may be changed again; a small one may still be on its way then.

    Args:
        array: any shape and dtype; any library's.
        dest: a rank of the world.
        tag: from 0 to 16,383.
        name: for the timeline.

    Raises:
        RankLeft: the other rank has left before it received.
    """
    from allranks.collectives.mpi.transport import complete
    from allranks.collectives.ops.point_to_point import Raw

    this = _world(dest, tag)
    source, _ = to_numpy(array)
    check(ReduceOp.Sum, source.dtype)
    head = ArrayHeader(name_of(source.dtype), source.shape).pack(_HEAD_BYTES)
    data = np.concatenate([head, source.reshape(-1).view(np.uint8)])
    assert this.mpi is not None
    comm = this.mpi.user

    def steps() -> Steps[None]:
        call.posted = True
        yield from complete(this.held_requests, call, Raw.Isend, comm, data, dest, _TAGS + tag)

    spec = Spec("send", dtype=name_of(source.dtype), shape=source.shape)
    call = PointCall(this.groups[0].agreement, spec, name, (dest,))
    call.nbytes, call.transport, call.steps = source.nbytes, "mpi", steps()
    this.run(call)


def recv(source: int, tag: int = 0, *, like: Any = None, name: str | None = None) -> Any:
    """Receives the array that a rank has sent with the same tag.

    Args:
        source: a rank of the world.
        tag: the sender's.
        like: an array of the kind and device that the result shall have; numpy where it is None.
        name: for the timeline.

    Raises:
        RankLeft: the other rank has left and has not sent.
    """
    from allranks.collectives.mpi.transport import complete

    this = _world(source, tag)
    assert this.mpi is not None
    comm = this.mpi.user

    def steps() -> Steps[Any]:
        from mpi4py import MPI

        status = MPI.Status()
        while (message := comm.Improbe(source, _TAGS + tag, status)) is None:
            yield call
        data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        call.posted = True
        yield from complete(this.held_requests, call, message.Irecv, data)
        head = ArrayHeader.unpack(data[:_HEAD_BYTES])
        call.nbytes = data.nbytes - _HEAD_BYTES
        return data[_HEAD_BYTES:].view(to_dtype(head.dtype)).reshape(head.shape)

    call = PointCall(this.groups[0].agreement, Spec("recv"), name, (source,))
    call.transport, call.steps = "mpi", steps()
    found = this.run(call)
    return found if like is None else to_numpy(like)[1](found)


def _world(peer: int, tag: int) -> World:
    this = world.current()
    if this.mpi is None:
        raise UsageError("send and recv need MPI, and the loopback has none. Use broadcast.")
    try:
        peer, tag = index(peer), index(tag)
        fits = 0 <= peer < this.size and peer != this.rank and 0 <= tag < _TAGS
    except TypeError:
        fits = False
    if not fits:
        raise UsageError(
            f"send and recv need another rank, from 0 to {this.size - 1}, and a tag below {_TAGS}: "
            f"found rank {peer!r:.60} (this is rank {this.rank}), tag {tag!r:.60}."
        )
    return this
