"""The operations that move arrays and objects without reducing them.

A function ``begin_…`` makes the call of an operation, ready to be driven. Its public forms have the
same arguments: one waits, and the ``_async`` one returns a handle.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives import world
from allranks.collectives.arrays.libraries import ArrayHeader, labels_of, to_dtype, to_numpy
from allranks.collectives.arrays.reductions import Array, ReduceOp, check, name_of
from allranks.collectives.calls.call import (
    ARRAY_TAGS,
    Call,
    Cut,
    PointCall,
    Steps,
    Transport,
    as_bytes,
)
from allranks.collectives.calls.specs import Spec, describe_group
from allranks.collectives.ops.inputs import (
    CollectiveInputs,
    Handle,
    listed,
    no_inputs,
    read_inputs,
    run,
)
from allranks.collectives.world.process_sets import ProcessSet, group_of
from allranks.collectives.world.world import Group
from allranks.errors import UsageError

Bytes = NDArray[np.uint8]
_HEAD_BYTES = 256


def _open(
    kind: str,
    arrays: Sequence[Any] | None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    transport: str | None = None,
    device: str = "",
) -> tuple[Group, CollectiveInputs, str | None]:
    """The group of a call, its arrays (None if this rank contributes none) and its name."""
    group = group_of(process_set, kind)
    if arrays is None:
        return group, no_inputs(kind, transport, device), name
    return group, read_inputs(kind, arrays, transport, device), name


def begin_barrier(process_set: ProcessSet | None = None, name: str | None = None) -> Call:
    group = group_of(process_set, "barrier")

    def steps(call: Call) -> Steps[None]:
        group.choose(call)
        yield from call.agreed()

    return group.call(Spec("barrier"), name, 0, steps)


def barrier(process_set: ProcessSet | None = None, name: str | None = None) -> None:
    """Returns on every rank once every rank has called it. Collective over the process set."""
    run(begin_barrier(process_set, name))


def begin_broadcast(array: Any, root: int, **options: Any) -> Call:
    group, inputs, name = _open("broadcast", [array], **options)
    source = inputs.sources[0]
    check(ReduceOp.Sum, source.dtype)  # a sum takes every dtype that can be moved
    index = group.index(root, "broadcast")
    spec = inputs.spec("broadcast", name_of(source.dtype), source.shape, root)

    def steps(call: Call) -> Steps[Any]:
        transport = group.choose(call, inputs.transport, inputs.gpu)
        out = transport.empty(source.shape, source.dtype)
        if group.me == index:
            with inputs.copying(call):
                np.copyto(out, source)
        yield from call.moved(transport.broadcast, as_bytes(out), index)
        return inputs.restored_alone(out)

    return inputs.marked(group.call(spec, name, source.nbytes, steps))


def broadcast(array: Any, root: int = 0, **options: Any) -> Any:
    """Every rank gets the root's array.

    Args:
        array: any shape and dtype, the same on every rank; its values count on the root only.
        root: its number among all ranks, also in a process set; the same on every rank.
        **options: ``name``, ``process_set``, ``transport`` as in `allreduce`.

    Returns:
        A new array of the kind, dtype, shape and device of this rank's input.

    Collective over the process set.
    """
    return run(begin_broadcast(array, root, **options))


def broadcast_async(array: Any, root: int = 0, **options: Any) -> Handle:
    """Posts a `broadcast`; `synchronize` returns its result."""
    return Handle(begin_broadcast(array, root, **options))


def begin_allgather(
    arrays: Sequence[Any],
    *,
    kind: str = "allgather",
    root: int = -1,
    labels: Sequence[str] = (),
    **options: Any,
) -> Call:
    """An allgather or gather of one array, or of several, whose result is a list."""
    arrays = listed(kind, arrays)
    group, inputs, name = _open(kind, arrays, **options)
    sources = inputs.sources
    for source in sources:
        _check_rows(source, kind)
    index = group.index(root, kind) if kind == "gather" else -1
    reads = index in (-1, group.me)
    looks = [(None, *source.shape[1:]) for source in sources]
    grouped = kind.startswith("grouped")
    labels = labels or labels_of(arrays, rows=False)
    dtypes, shapes = describe_group([name_of(source.dtype) for source in sources], looks, labels)
    spec = inputs.spec(kind, dtypes, shapes if grouped or labels else looks[0], root)
    # The number of rows without bytes cannot be computed from the size, so it is sent, too.
    tabled = grouped or 0 in looks[0]

    def steps(call: Call) -> Steps[Any]:
        transport = group.choose(call, inputs.transport, inputs.gpu)
        if inputs.device:
            wholes = yield from _gather_on_gpu(group, call, transport, sources, index)
        else:
            data = _tabled(sources) if tabled else as_bytes(sources[0])
            parts = yield from call.moved(transport.allgather, data, root=index)
            if not reads:
                wholes = []
            elif tabled:
                cut = [_cut(part, sources) for part in parts]
                wholes = [np.concatenate(pieces) for pieces in zip(*cut, strict=True)]
            else:
                wholes = [_join(parts, sources[0])]
        if not reads:
            return None
        return inputs.restored(wholes) if grouped else inputs.restored_alone(wholes[0])

    nbytes = sum(source.nbytes for source in sources) * group.size
    return inputs.marked(group.call(spec, name, nbytes, steps))


def _gather_on_gpu(
    group: Group, call: Call, transport: Transport, sources: list[Array], root: int
) -> Steps[list[Array]]:
    """All members' rows of each array; their numbers are exchanged through the host."""
    assert group.gpu is not None
    yield from call.agreed()
    counts = yield from group.gpu.table(call, [len(source) for source in sources])
    wholes = []
    for source, *rows in zip(sources, *counts, strict=True):
        width = int(np.prod(source.shape[1:])) * source.itemsize
        lengths = [count * width for count in rows]
        parts = yield from call.moved(transport.allgather, as_bytes(source), lengths, root)
        if root in (-1, group.me):
            wholes.append(_join(parts, source, sum(rows)))
    return wholes


def _check_rows(array: Array, op: str) -> None:
    check(ReduceOp.Sum, array.dtype)
    if array.ndim == 0:
        raise UsageError(f"{op} needs a first dimension: found a scalar. Pass x.reshape(1).")


def _tabled(sources: Sequence[Array]) -> Array:
    table = np.array([len(source) for source in sources], np.int64)
    return np.concatenate([table.view(np.uint8), *map(as_bytes, sources)])


def _join(parts: Sequence[Array], like: Array, rows: int = -1) -> Array:
    whole: Array
    if isinstance(parts, Cut):
        whole = parts.whole
    else:
        whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return whole.view(like.dtype).reshape(rows, *like.shape[1:])


def _cut(part: Array, sources: Sequence[Array]) -> list[Array]:
    start = 8 * len(sources)
    pieces = []
    for count, source in zip(part[:start].view(np.int64).tolist(), sources, strict=True):
        shape = (count, *source.shape[1:])
        size = int(np.prod(shape)) * source.itemsize
        pieces.append(part[start : start + size].copy().view(source.dtype).reshape(shape))
        start += size
    return pieces


def allgather(array: Any, **options: Any) -> Any:
    """Every rank gets all ranks' arrays, one after the other along the first dimension.

    Args:
        array: shape (rows, ...): rows may differ between ranks, the rest and the dtype may not.
        **options: ``name``, ``process_set``, ``transport`` as in `allreduce`.

    Returns:
        Shape (sum of rows, ...), the same on every rank.

    Collective over the process set.
    """
    return run(begin_allgather([array], **options))


def allgather_async(array: Any, **options: Any) -> Handle:
    """Posts an `allgather`; `synchronize` returns its result."""
    return Handle(begin_allgather([array], **options))


def grouped_allgather(arrays: Sequence[Any], **options: Any) -> list[Any]:
    """Every rank gets the allgathers of a list of arrays, moved together: one wait for all.

    Collective over the process set.
    """
    arrays = listed("grouped_allgather", arrays)
    if not arrays:
        return []
    result: list[Any] = run(begin_allgather(arrays, kind="grouped_allgather", **options))
    return result


def grouped_allgather_async(arrays: Sequence[Any], **options: Any) -> Handle:
    """Posts a `grouped_allgather` of at least one array; `synchronize` returns its results."""
    return Handle(begin_allgather(arrays, kind="grouped_allgather", **options))


def gather(array: Any, root: int = 0, **options: Any) -> Any:
    """The root gets the result of an `allgather`; the others get None.

    Collective over the process set.
    """
    return run(begin_allgather([array], kind="gather", root=root, **options))


def gather_async(array: Any, root: int = 0, **options: Any) -> Handle:
    """Posts a `gather`; `synchronize` returns its result."""
    return Handle(begin_allgather([array], kind="gather", root=root, **options))


def begin_scatter(array: Any, root: int, splits: Any = None, **options: Any) -> Call:
    mine = world.current().rank == root
    group, inputs, name = _open(
        "scatter", [array] if mine or array is not None else None, **options
    )
    index = group.index(root, "scatter")
    source = inputs.sources[0]
    rows: list[int] = []
    if mine:
        _check_rows(source, "scatter")
        rows = _splits("scatter", source, splits, group.size)
    else:
        # Only the root's array is used.
        source = source.reshape(-1)[:0].view(np.uint8)

    def steps(call: Call) -> Steps[Any]:
        data, back = source, inputs
        # Headers go through host memory, also if the array is on a GPU.
        transport = group.choose(call, "" if inputs.device else inputs.transport)
        # The dtype and shape are sent first: the other ranks lack them.
        mine = ArrayHeader(name_of(source.dtype), source.shape[1:]) if rows else ArrayHeader()
        told = mine._replace(device=inputs.device).pack()
        heads = list(map(ArrayHeader.unpack, (yield from call.moved(transport.allgather, told))))
        head = heads[index]
        like = np.empty((0, *head.shape), to_dtype(head.dtype))
        if inputs.gpu is not None and all(head.device for head in heads):
            transport = group.choose(call, inputs.transport, inputs.gpu)
            like = inputs.gpu.empty(like.shape, like.dtype)
        elif inputs.device:
            # A rank has no array on a GPU: the data goes through the host.
            brought, restore = to_numpy(array)
            data = brought if rows else brought.reshape(-1)[:0].view(np.uint8)
            back = CollectiveInputs([brought], [restore])
        parts, received = yield from _exchanged(call, transport, data, rows, like, index)
        return back.restored_alone(_join([parts[index]], like, received[index]))

    spec = Spec("scatter", root=root, transport=inputs.transport)
    return inputs.marked(group.call(spec, name, source.nbytes, steps))


def scatter(array: Any = None, root: int = 0, splits: Any = None, **options: Any) -> Any:
    """Every rank gets its piece of the root's array, cut along the first dimension.

    Args:
        array: shape (rows, ...) on the root; elsewhere None, or an array of the kind and device
            that the result should have.
        root: a rank of the world, the same on every rank.
        splits: on the root, the number of rows for each rank; by default equal pieces.
        **options: ``name``, ``process_set``, ``transport`` as in `allreduce`.

    Collective over the process set.
    """
    return run(begin_scatter(array, root, splits, **options))


def scatter_async(array: Any = None, root: int = 0, splits: Any = None, **options: Any) -> Handle:
    """Posts a `scatter`; `synchronize` returns its result."""
    return Handle(begin_scatter(array, root, splits, **options))


def begin_alltoall(array: Any, splits: Any = None, **options: Any) -> Call:
    """An alltoall; its result is an array, with ``splits`` a pair with the received splits."""
    group, inputs, name = _open("alltoall", [array], **options)
    source = inputs.sources[0]
    _check_rows(source, "alltoall")
    rows = _splits("alltoall", source, splits, group.size)
    look, labels = (None, *source.shape[1:]), labels_of([array], rows=False)
    dtypes, shapes = describe_group([name_of(source.dtype)], [look], labels)
    spec = inputs.spec("alltoall", dtypes, shapes if labels else look)

    def steps(call: Call) -> Steps[Any]:
        transport = group.choose(call, inputs.transport, inputs.gpu)
        parts, received = yield from _exchanged(call, transport, source, rows, source)
        pieces = inputs.restored_alone(_join(parts, source, sum(received)))
        return pieces if splits is None else (pieces, received)

    return inputs.marked(group.call(spec, name, source.nbytes, steps))


def alltoall(array: Any, splits: Any = None, **options: Any) -> Any:
    """Every rank sends each rank a piece of its array and gets a piece from each.

    Args:
        array: shape (rows, ...): rows may differ between ranks, the rest and the dtype may not.
        splits: the number of rows for each rank, (size,); by default equal pieces.
        **options: ``name``, ``process_set``, ``transport`` as in `allreduce`.

    Returns:
        The pieces in the order of the ranks they come from, (received rows, ...); with
        ``splits`` a pair of that and the number of rows received from each rank.

    Collective over the process set.
    """
    return run(begin_alltoall(array, splits, **options))


def alltoall_async(array: Any, splits: Any = None, **options: Any) -> Handle:
    """Posts an `alltoall`; `synchronize` returns its result."""
    return Handle(begin_alltoall(array, splits, **options))


def _exchanged(
    call: Call, transport: Transport, source: Array, rows: list[int], like: Array, root: int = -1
) -> Steps[tuple[list[Array], list[int]]]:
    """The rows from each member, and their numbers; ``like`` has their shape and dtype."""
    row = int(np.prod(like.shape[1:])) * like.itemsize
    # A byte stands for each row without bytes.
    flat = as_bytes(source) if row else np.empty_like(source, np.uint8, shape=(sum(rows),))
    lengths = [count * (row or 1) for count in rows]
    parts = yield from call.moved(transport.alltoall, flat, lengths, root)
    received = [part.nbytes // (row or 1) for part in parts]
    if row:
        return parts, received
    return [np.empty_like(like, np.uint8, shape=(0,))] * len(parts), received


def _splits(kind: str, source: Array, splits: Any, size: int) -> list[int]:
    rows = source.shape[0]
    if splits is None:
        if rows % size:
            raise UsageError(
                f"{kind} without splits needs a first dimension that is a multiple of {size}: "
                f"found {rows}. Pass splits=, one number of rows a rank."
            )
        return [rows // size] * size
    given = to_numpy(splits)[0].reshape(-1)
    chosen = given.tolist()
    if given.size and given.dtype.kind not in "iu":
        raise UsageError(
            f"{kind} needs splits of whole numbers: found {chosen}. Pass one number of rows a rank."
        )
    if len(chosen) != size or min(chosen) < 0 or sum(chosen) != rows:
        raise UsageError(
            f"{kind} needs {size} splits that add up to the first dimension, {rows}: "
            f"found {chosen}. Pass one number of rows a rank."
        )
    return chosen


def dumps(value: object) -> Bytes:
    from allranks.collectives.ops import objects  # here: cloudpickle takes time to import

    return np.frombuffer(objects.dumps(value), np.uint8)


def loads(data: Bytes) -> Any:
    return pickle.loads(data.tobytes())


def begin_object_broadcast(
    group: Group, op: str, value: object, name: str | None = None, root: int = 0
) -> Call:
    """A call whose result is the root's object; ``root`` is a member's index."""
    # An allgather to which the other members contribute nothing: they do not know the size.
    data = dumps(value) if group.me == root else np.empty(0, np.uint8)

    def steps(call: Call) -> Steps[Any]:
        parts = yield from call.moved(group.choose(call).allgather, data)
        call.nbytes = parts[root].nbytes  # other members learn the size here
        return value if group.me == root else loads(parts[root])

    return group.call(Spec(op, root=_rank(group, root)), name, data.nbytes, steps)


def broadcast_object(
    value: Any = None,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Every rank gets a copy of the root's object; the root gets the object itself.

    Collective over the process set.
    """
    group = group_of(process_set, "broadcast_object")
    index = group.index(root, "broadcast_object")
    return run(begin_object_broadcast(group, "broadcast_object", value, name, index))


def begin_object_gather(
    group: Group,
    op: str,
    value: object,
    name: str | None = None,
    root: int = -1,
    alike: tuple[Any, ...] = (),
    refused: int = 0,
    reduction: str = "",
) -> Call:
    """A call whose result is the list of all members' objects, on all or on ``root`` (an index).
    ``alike``, ``refused`` and ``reduction``, as in `Spec`: values that must be the same on every
    member.
    """
    data = dumps(value)

    def steps(call: Call) -> Steps[list[Any] | None]:
        parts = yield from call.moved(group.choose(call).allgather, data, root=root)
        return [loads(part) for part in parts] if root in (-1, group.me) else None

    spec = Spec(op, reduction, shape=alike, root=_rank(group, root), refused=refused)
    return group.call(spec, name, data.nbytes * group.size, steps)


def allgather_object(
    value: Any, *, name: str | None = None, process_set: ProcessSet | None = None
) -> list[Any]:
    """Every rank gets the list of all ranks' objects, in the order of the ranks.

    Collective over the process set.
    """
    group = group_of(process_set, "allgather_object")
    result: list[Any] = run(begin_object_gather(group, "allgather_object", value, name))
    return result


def begin_object_alltoall(
    group: Group, op: str, values: list[Any], name: str | None = None, root: int = -1
) -> Call:
    """A call whose result is the objects for this member, from all or from ``root`` only."""
    pieces = [dumps(value) for value in values]
    data = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)

    def steps(call: Call) -> Steps[list[Any]]:
        lengths = [piece.nbytes for piece in pieces]
        parts = yield from call.moved(group.choose(call).alltoall, data, lengths, root)
        call.nbytes = max(data.nbytes, sum(part.nbytes for part in parts))
        return [loads(part) if part.size else None for part in parts]

    return group.call(Spec(op, root=_rank(group, root)), name, data.nbytes, steps)


def _rank(group: Group, root: int) -> int:
    return group.ranks[root] if root >= 0 else -1


def send(array: Any, dest: int, tag: int = 0, *, name: str | None = None) -> None:
    """One rank's array goes to another, which calls `recv`.

    It returns when the array may be changed again, possibly before the other rank has received it.

    Args:
        array: any shape and dtype, of any library.
        dest: a rank of the world.
        tag: from 0 to 16,383.
        name: the name in the timeline.

    Raises:
        RankLeft: the other rank has left before it received.
    """
    from allranks.collectives.mpi.transport import complete
    from allranks.collectives.ops.point_to_point import post_send

    this = _world(dest, tag)
    source, _ = to_numpy(array)
    check(ReduceOp.Sum, source.dtype)
    head = ArrayHeader(name_of(source.dtype), source.shape).pack(_HEAD_BYTES)
    data = np.concatenate([head, source.reshape(-1).view(np.uint8)])
    assert this.mpi is not None
    comm = this.mpi.user

    def steps() -> Steps[None]:
        call.posted = True
        yield from complete(this.held_requests, call, post_send, comm, data, dest, ARRAY_TAGS + tag)

    spec = Spec("send", dtype=name_of(source.dtype), shape=source.shape)
    call = PointCall(this.groups[0].agreement, spec, name, (dest,))
    call.nbytes, call.transport, call.steps = source.nbytes, "mpi", steps()
    this.run(call)


def recv(source: int, tag: int = 0, *, like: Any = None, name: str | None = None) -> Any:
    """Receives the array that a rank has sent with the same tag.

    Args:
        source: a rank of the world.
        tag: the sender's.
        like: an array of the kind and device that the result should have; by default numpy.
        name: the name in the timeline.

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
        # The message contains the size. Once it is matched, no other receive can get it.
        message = yield from comm.awaited(call, source, tag, status, ARRAY_TAGS)
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


def _world(peer: int, tag: int) -> world.World:
    this = world.current()
    if this.mpi is None:
        raise UsageError("send and recv need MPI, and the loopback has none. Use broadcast.")
    try:
        peer, tag = operator.index(peer), operator.index(tag)
        fits = 0 <= peer < this.size and peer != this.rank and 0 <= tag < ARRAY_TAGS
    except TypeError:
        fits = False
    if not fits:
        raise UsageError(
            f"send and recv need another rank, from 0 to {this.size - 1}, and a tag below "
            f"{ARRAY_TAGS}: found rank {peer!r:.60} (this is rank {this.rank}), tag {tag!r:.60}."
        )
    return this
