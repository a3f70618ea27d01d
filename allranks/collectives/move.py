"""broadcast, allgather, gather, scatter, alltoall and barrier. Runs in every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.arrays import Array, to_dtype, to_numpy
from allranks.collectives.call import Call
from allranks.collectives.callsite import here
from allranks.collectives.guard import Spec
from allranks.collectives.handles import Handle
from allranks.collectives.process_sets import ProcessSet, group_of
from allranks.collectives.reductions import ReduceOp, check, name_of
from allranks.errors import UsageError
from allranks.records.ranks import label

if TYPE_CHECKING:
    from allranks.collectives.group import Group
    from allranks.collectives.wait import Steps


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
) -> Call:
    """A broadcast, ready to be driven."""
    group = group_of(process_set, "broadcast")
    source, restore = to_numpy(array)
    check(ReduceOp.Sum, source.dtype)
    index = member(group, root, "broadcast")
    spec = Spec(
        "broadcast", "", name_of(source.dtype), source.shape, root, transport=transport or ""
    )
    call = Call(group, spec, here(), name or "", source.nbytes)

    def steps() -> Steps[Any]:
        way = group.choose(source.nbytes, call, transport or "")
        out = source.copy() if group.me == index else np.empty(source.shape, source.dtype)
        yield from way.broadcast(call, _bytes(out), index)
        return restore(out)

    call.steps = steps()
    return call


def begin_allgather(
    arrays: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet | None = None,
    transport: str | None = None,
    *,
    kind: str = "allgather",
    root: int = -1,
) -> Call:
    """An allgather or gather of one array or of several, ready to be driven; ends with a list."""
    group = group_of(process_set, kind)
    pairs = [to_numpy(array) for array in arrays]
    for source, _ in pairs:
        _rows(source, kind)
    index = member(group, root, kind) if root >= 0 else -1
    shapes = tuple((None, *source.shape[1:]) for source, _ in pairs)
    grouped = kind.startswith("grouped")
    dtypes = "+".join(name_of(source.dtype) for source, _ in pairs)
    shape = shapes if grouped else shapes[0]
    spec = Spec(kind, "", dtypes, shape, root, transport=transport or "")
    nbytes = sum(source.nbytes for source, _ in pairs)
    call = Call(group, spec, here(), name or "", nbytes * group.size)

    # Rows of no bytes cannot be counted from the bytes that came, so their number goes with them.
    tabled = grouped or 0 in shape[1:]

    def steps() -> Steps[list[Any]]:
        way = group.choose(nbytes, call, transport or "")
        data = _tabled(pairs) if tabled else _bytes(pairs[0][0])
        parts = yield from way.allgather(call, data, root=index)
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
) -> Call:
    """An alltoall, ready to be driven; ends with (array, received splits)."""
    group = group_of(process_set, "alltoall")
    source, restore = to_numpy(array)
    _rows(source, "alltoall")
    rows = _splits("alltoall", source, splits, group.size)
    shape = (None, *source.shape[1:])
    spec = Spec("alltoall", "", name_of(source.dtype), shape, transport=transport or "")
    call = Call(group, spec, here(), name or "", source.nbytes)

    def steps() -> Steps[tuple[Any, list[int]]]:
        way = group.choose(source.nbytes, call, transport or "")
        row = int(np.prod(source.shape[1:])) * source.itemsize
        lengths = [count * row for count in rows]
        parts = yield from way.alltoall(call, _bytes(source), lengths)
        received = [part.nbytes // row if row else 0 for part in parts]
        out = _join(parts, source) if row else np.empty((0, *source.shape[1:]), source.dtype)
        return restore(out), received

    call.steps = steps()
    return call


def begin_scatter(
    array: Any,
    root: int,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    transport: str | None = None,
) -> Call:
    """A scatter, ready to be driven; only the root's array counts."""
    group = group_of(process_set, "scatter")
    index = member(group, root, "scatter")
    mine = group.me == index
    source, restore = to_numpy(array if mine or array is not None else ())
    rows: list[int] = []
    if not mine:
        source = np.empty(0)
    else:
        _rows(source, "scatter")
        rows = _splits("scatter", source, splits, group.size)
    call = Call(
        group, Spec("scatter", root=root, transport=transport or ""), here(), name or "",
        source.nbytes,
    )  # fmt: skip

    def steps() -> Steps[Any]:
        way = group.choose(source.nbytes, call, transport or "")
        # What it is goes ahead of it: the others bring nothing to tell it from.
        kind = f"{name_of(source.dtype)} {' '.join(map(str, source.shape[1:]))}" if rows else ""
        kinds = np.frombuffer(kind.encode(), np.uint8)
        told = yield from way.allgather(call, kinds)
        name, *sizes = told[index].tobytes().decode().split()
        like = np.empty((0, *map(int, sizes)), to_dtype(name))
        row = int(np.prod(like.shape[1:])) * like.itemsize
        lengths = [count * row for count in rows]
        data = _bytes(source) if rows else np.empty(0, np.uint8)
        parts = yield from way.alltoall(call, data, lengths, root=index)
        return restore(_join([parts[index]], like) if row else like)

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
    call = Call(group, Spec("barrier"), here(), name or "", 0)

    def steps() -> Steps[None]:
        group.choose(0, call)
        yield from group.agree(call)

    call.steps = steps()
    return call


def run(call: Call) -> Any:
    """Drives a call of this rank's world to its end."""
    return world.current().run(call)


def post(call: Call, pick: Any = None) -> Handle:
    """Posts a call of this rank's world."""
    return Handle(call, pick)
