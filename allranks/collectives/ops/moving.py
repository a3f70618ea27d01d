"""broadcast, allgather, gather, scatter, alltoall and barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.arrays.heads import Head
from allranks.collectives.arrays.libraries import Array, to_dtype, to_numpy
from allranks.collectives.arrays.reductions import ReduceOp, check, name_of
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.guard import Spec, describe_group
from allranks.collectives.calls.wait import Steps
from allranks.collectives.ops.gathering import gather_on_gpu
from allranks.collectives.ops.handles import Handle
from allranks.collectives.ops.taking import take, take_none
from allranks.collectives.world.group import Group
from allranks.collectives.world.process_sets import ProcessSet, group_of
from allranks.errors import UsageError
from allranks.records.ranks import label


def member(group: Group, root: int, op: str) -> int:
    """The root's place among a group's members.

    Raises:
        UsageError: it is none of them.
    """
    if root in group.ranks:
        return group.ranks.index(root)
    raise UsageError(
        f"{op} needs a root that is in the process set: found {root}, and it has "
        f"{label(group.ranks)}. The root is a rank of the world."
    )


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _rows(array: Array, op: str) -> None:
    check(ReduceOp.Sum, array.dtype)
    if array.ndim == 0:
        raise UsageError(f"{op} needs a first dimension: found a scalar. Pass x.reshape(1).")


def begin_broadcast(
    array: Any,
    root: int,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    transport: str | None = None,
    device: str = "",
) -> Call:
    """A broadcast, ready to be driven."""
    group = group_of(process_set, "broadcast")
    taken = take("broadcast", [array], transport, device)
    source, restore = taken.sources[0], taken.restores[0]
    check(ReduceOp.Sum, source.dtype)
    index = member(group, root, "broadcast")
    spec = Spec(
        "broadcast", "", name_of(source.dtype), source.shape, root,
        transport=taken.transport, device=taken.device,
    )  # fmt: skip
    call = group.call(spec, name, source.nbytes)
    call.ready = taken.mark()

    def steps() -> Steps[Any]:
        transport = group.choose(call, taken.transport, taken.gpu)
        out = transport.empty(source.shape, source.dtype)
        if group.me == index:
            with transport.copying(call):
                np.copyto(out, source)
        yield from call.moved(transport.broadcast, _bytes(out), index)
        return restore(out)

    call.steps = steps()
    return call


def begin_allgather(
    arrays: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet | None = None,
    transport: str | None = None,
    device: str = "",
    *,
    kind: str = "allgather",
    root: int = -1,
    labels: Sequence[str] = (),
) -> Call:
    """An allgather or gather of one array or of several, ready to be driven; ends with a list."""
    group = group_of(process_set, kind)
    taken = take(kind, arrays, transport, device)
    pairs = list(zip(taken.sources, taken.restores, strict=True))
    for source, _ in pairs:
        _rows(source, kind)
    index = member(group, root, kind) if kind == "gather" else -1
    looks = [(None, *source.shape[1:]) for source, _ in pairs]
    grouped = kind.startswith("grouped")
    dtypes, shapes = describe_group([name_of(source.dtype) for source, _ in pairs], looks, labels)
    shape = shapes if grouped else looks[0]
    spec = Spec(kind, "", dtypes, shape, root, transport=taken.transport, device=taken.device)
    nbytes = sum(source.nbytes for source, _ in pairs)
    call = group.call(spec, name, nbytes * group.size)
    call.ready = taken.mark()
    if taken.device:
        call.steps = gather_on_gpu(group, call, taken, index)
        return call

    # Rows of no bytes cannot be counted from the bytes that came, so their number goes with them.
    tabled = grouped or 0 in shape[1:]

    def steps() -> Steps[list[Any]]:
        transport = group.choose(call, taken.transport)
        data = _tabled(pairs) if tabled else _bytes(pairs[0][0])
        parts = yield from call.moved(transport.allgather, data, root=index)
        if index not in (-1, group.me):
            return [None] * len(pairs)
        if not tabled:
            source, restore = pairs[0]
            return [restore(_join(parts, source))]
        cut = [_cut(part, pairs) for part in parts]
        return [
            restore(np.concatenate([pieces[i] for pieces in cut]))
            for i, (_, restore) in enumerate(pairs)
        ]

    call.steps = steps()
    return call


def _tabled(pairs: Sequence[tuple[Array, Any]]) -> Array:
    table = np.array([len(source) for source, _ in pairs], np.int64)
    return np.concatenate([table.view(np.uint8), *(_bytes(source) for source, _ in pairs)])


def _join(parts: Sequence[Array], like: Array) -> Array:
    whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return whole.view(like.dtype).reshape(-1, *like.shape[1:])


def _row_bytes(source: Array, row: int, count: int) -> Array:
    """What is sent of so many rows of ``row`` bytes; where that is none a byte stands for each."""
    return _bytes(source) if row else np.empty_like(source, np.uint8, shape=(count,))


def _joined_rows(parts: Sequence[Array], like: Array, row: int) -> Array:
    """The rows again, of the parts that came."""
    if row:
        return _join(parts, like)
    return np.empty_like(like, shape=(sum(part.nbytes for part in parts), *like.shape[1:]))


def _cut(part: Array, pairs: Sequence[tuple[Array, Any]]) -> list[Array]:
    start = 8 * len(pairs)
    pieces = []
    for count, (source, _) in zip(part[:start].view(np.int64), pairs, strict=True):
        shape = (int(count), *source.shape[1:])
        size = int(np.prod(shape)) * source.itemsize
        pieces.append(part[start : start + size].copy().view(source.dtype).reshape(shape))
        start += size
    return pieces


def begin_alltoall(
    array: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    transport: str | None = None,
    device: str = "",
) -> Call:
    """An alltoall, ready to be driven; ends with (array, received splits)."""
    group = group_of(process_set, "alltoall")
    taken = take("alltoall", [array], transport, device)
    source, restore = taken.sources[0], taken.restores[0]
    _rows(source, "alltoall")
    rows = _splits("alltoall", source, splits, group.size)
    shape = (None, *source.shape[1:])
    spec = Spec(
        "alltoall", "", name_of(source.dtype), shape,
        transport=taken.transport, device=taken.device,
    )  # fmt: skip
    call = group.call(spec, name, source.nbytes)
    call.ready = taken.mark()

    def steps() -> Steps[tuple[Any, list[int]]]:
        transport = group.choose(call, taken.transport, taken.gpu)
        row = int(np.prod(source.shape[1:])) * source.itemsize
        lengths = [count * (row or 1) for count in rows]
        flat = _row_bytes(source, row, sum(rows))
        parts = yield from call.moved(transport.alltoall, flat, lengths)
        received = [part.nbytes // (row or 1) for part in parts]
        return restore(_joined_rows(parts, source, row)), received

    call.steps = steps()
    return call


def begin_scatter(
    array: Any,
    root: int,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    transport: str | None = None,
    device: str = "",
) -> Call:
    """A scatter, ready to be driven; only the root's array counts."""
    group = group_of(process_set, "scatter")
    index = member(group, root, "scatter")
    mine = group.me == index
    taken = (
        take("scatter", [array], transport, device)
        if mine or array is not None
        else take_none("scatter", transport, device)
    )
    source = taken.sources[0]
    rows: list[int] = []
    if not mine:
        source = source.reshape(-1)[:0].view(np.uint8)
    else:
        _rows(source, "scatter")
        rows = _splits("scatter", source, splits, group.size)
    spec = Spec("scatter", root=root, transport=taken.transport)
    call = group.call(spec, name, source.nbytes)
    call.ready = taken.mark()

    def steps() -> Steps[Any]:
        wanted, data, restore = taken.transport, source, taken.restores[0]
        transport = group.choose(call, "" if taken.device else wanted)
        # What it is goes ahead of it: the others bring nothing to tell it from.
        mine = Head(name_of(source.dtype), source.shape[1:]) if rows else Head()
        told = mine._replace(device=taken.device).pack()
        heads = list(map(Head.unpack, (yield from call.moved(transport.allgather, told))))
        head = heads[index]
        like = np.empty((0, *head.shape), to_dtype(head.dtype))
        row = int(np.prod(like.shape[1:])) * like.itemsize
        if taken.gpu is not None and all(head.device for head in heads):
            transport = group.choose(call, wanted, taken.gpu)
            like = taken.gpu.empty(like.shape, like.dtype)
        elif taken.device:
            # Somebody has no array on a GPU: it goes through the host.
            brought, restore = to_numpy(array)
            data = brought if rows else brought.reshape(-1)[:0].view(np.uint8)
        lengths = [count * (row or 1) for count in rows]
        flat = _row_bytes(data, row, sum(rows))
        parts = yield from call.moved(transport.alltoall, flat, lengths, root=index)
        return restore(_joined_rows([parts[index]], like, row))

    call.steps = steps()
    return call


def _splits(kind: str, source: Array, splits: Any, size: int) -> list[int]:
    rows = source.shape[0]
    if splits is None:
        if rows % size:
            raise UsageError(
                f"{kind} without splits needs a first dimension that is a multiple of {size}: "
                f"found {rows}. Pass splits=, one number of rows a rank."
            )
        return [rows // size] * size
    chosen = [int(count) for count in to_numpy(splits)[0].reshape(-1)]
    if len(chosen) != size or min(chosen) < 0 or sum(chosen) != rows:
        raise UsageError(
            f"{kind} needs {size} splits that add up to the first dimension, {rows}: "
            f"found {chosen}. Pass one number of rows a rank."
        )
    return chosen


def begin_barrier(process_set: ProcessSet | None = None, name: str | None = None) -> Call:
    """A barrier, ready to be driven."""
    group = group_of(process_set, "barrier")
    call = group.call(Spec("barrier"), name, 0)

    def steps() -> Steps[None]:
        group.choose(call)
        yield from call.agreed()

    call.steps = steps()
    return call


def run(call: Call) -> Any:
    """Drives a call of this rank's world to its end."""
    return world.current().run(call)


def post(call: Call, pick: Any = None) -> Handle:
    """Posts a call of this rank's world."""
    return Handle(call, pick)
