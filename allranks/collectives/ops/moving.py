"""broadcast, allgather, gather, scatter, alltoall and barrier, ready to be driven."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.arrays.heads import Head
from allranks.collectives.arrays.libraries import to_dtype, to_numpy
from allranks.collectives.arrays.reductions import Array, ReduceOp, check, name_of
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.guard import Spec, describe_group
from allranks.collectives.calls.transport import Cut, Transport, as_bytes
from allranks.collectives.calls.wait import Steps
from allranks.collectives.ops.taking import Taken, take, take_none
from allranks.collectives.world.group import Group
from allranks.collectives.world.process_sets import ProcessSet, group_of
from allranks.errors import UsageError


def _open(
    kind: str,
    arrays: Sequence[Any] | None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    transport: str | None = None,
    device: str = "",
) -> tuple[Group, Taken, str | None]:
    """The group of a call, its arrays (None where it brings nothing) and its name."""
    group = group_of(process_set, kind)
    if arrays is None:
        return group, take_none(kind, transport, device), name
    return group, take(kind, arrays, transport, device), name


def _rows(array: Array, op: str) -> None:
    check(ReduceOp.Sum, array.dtype)
    if array.ndim == 0:
        raise UsageError(f"{op} needs a first dimension: found a scalar. Pass x.reshape(1).")


def begin_broadcast(array: Any, root: int, **options: Any) -> Call:
    """A broadcast."""
    group, taken, name = _open("broadcast", [array], **options)
    source = taken.sources[0]
    check(ReduceOp.Sum, source.dtype)
    index = group.index(root, "broadcast")
    spec = taken.spec("broadcast", name_of(source.dtype), source.shape, root)

    def steps(call: Call) -> Steps[Any]:
        transport = group.choose(call, taken.transport, taken.gpu)
        out = transport.empty(source.shape, source.dtype)
        if group.me == index:
            with taken.copying(call):
                np.copyto(out, source)
        yield from call.moved(transport.broadcast, as_bytes(out), index)
        return taken.restored_alone(out)

    return taken.marked(group.call(spec, name, source.nbytes, steps))


def begin_allgather(
    arrays: Sequence[Any],
    *,
    kind: str = "allgather",
    root: int = -1,
    labels: Sequence[str] = (),
    **options: Any,
) -> Call:
    """An allgather or gather of one array or of several; ends with a list."""
    group, taken, name = _open(kind, arrays, **options)
    sources = taken.sources
    for source in sources:
        _rows(source, kind)
    index = group.index(root, kind) if kind == "gather" else -1
    reads = index in (-1, group.me)
    looks = [(None, *source.shape[1:]) for source in sources]
    grouped = kind.startswith("grouped")
    dtypes, shapes = describe_group([name_of(source.dtype) for source in sources], looks, labels)
    spec = taken.spec(kind, dtypes, shapes if grouped else looks[0], root)
    # Rows of no bytes cannot be counted from the bytes that came, so their number goes with them.
    tabled = grouped or 0 in looks[0]

    def steps(call: Call) -> Steps[list[Any]]:
        transport = group.choose(call, taken.transport, taken.gpu)
        if taken.device:
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
            return [None] * len(sources)
        return taken.restored(wholes)

    nbytes = sum(source.nbytes for source in sources) * group.size
    return taken.marked(group.call(spec, name, nbytes, steps))


def _gather_on_gpu(
    group: Group, call: Call, transport: Transport, sources: list[Array], root: int
) -> Steps[list[Array]]:
    """All members' rows of each array; how many there are is told on the host."""
    assert group.gpu is not None
    yield from call.agreed()
    mine = np.array([len(source) for source in sources], np.int64).tobytes()
    told = yield from group.gpu.share(call, mine)
    counts = np.array([np.frombuffer(one, np.int64) for one in told])
    wholes = []
    for source, rows in zip(sources, counts.T.tolist(), strict=True):
        width = int(np.prod(source.shape[1:])) * source.itemsize
        lengths = [count * width for count in rows]
        parts = yield from call.moved(transport.allgather, as_bytes(source), lengths, root)
        if root in (-1, group.me):
            wholes.append(_join(parts, source, sum(rows)))
    return wholes


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


def _exchanged(
    call: Call, transport: Transport, source: Array, rows: list[int], like: Array, root: int = -1
) -> Steps[tuple[list[Array], list[int]]]:
    """The rows that came from each member, and how many; ``like`` has their shape and dtype."""
    row = int(np.prod(like.shape[1:])) * like.itemsize
    # Rows of no bytes: a byte stands for each.
    flat = as_bytes(source) if row else np.empty_like(source, np.uint8, shape=(sum(rows),))
    lengths = [count * (row or 1) for count in rows]
    parts = yield from call.moved(transport.alltoall, flat, lengths, root)
    received = [part.nbytes // (row or 1) for part in parts]
    if row:
        return parts, received
    return [np.empty_like(like, np.uint8, shape=(0,))] * len(parts), received


def begin_alltoall(array: Any, splits: Any = None, **options: Any) -> Call:
    """An alltoall; ends with (array, received splits)."""
    group, taken, name = _open("alltoall", [array], **options)
    source = taken.sources[0]
    _rows(source, "alltoall")
    rows = _splits("alltoall", source, splits, group.size)
    spec = taken.spec("alltoall", name_of(source.dtype), (None, *source.shape[1:]))

    def steps(call: Call) -> Steps[tuple[Any, list[int]]]:
        transport = group.choose(call, taken.transport, taken.gpu)
        parts, received = yield from _exchanged(call, transport, source, rows, source)
        return taken.restored_alone(_join(parts, source, sum(received))), received

    return taken.marked(group.call(spec, name, source.nbytes, steps))


def begin_scatter(array: Any, root: int, splits: Any = None, **options: Any) -> Call:
    """A scatter; only the root's array counts."""
    mine = world.current().rank == root
    group, taken, name = _open("scatter", [array] if mine or array is not None else None, **options)
    index = group.index(root, "scatter")
    source = taken.sources[0]
    rows: list[int] = []
    if mine:
        _rows(source, "scatter")
        rows = _splits("scatter", source, splits, group.size)
    else:
        source = source.reshape(-1)[:0].view(np.uint8)

    def steps(call: Call) -> Steps[Any]:
        data, back = source, taken
        transport = group.choose(call, "" if taken.device else taken.transport)
        # What it is goes ahead of it: the others bring nothing to tell it from.
        mine = Head(name_of(source.dtype), source.shape[1:]) if rows else Head()
        told = mine._replace(device=taken.device).pack()
        heads = list(map(Head.unpack, (yield from call.moved(transport.allgather, told))))
        head = heads[index]
        like = np.empty((0, *head.shape), to_dtype(head.dtype))
        if taken.gpu is not None and all(head.device for head in heads):
            transport = group.choose(call, taken.transport, taken.gpu)
            like = taken.gpu.empty(like.shape, like.dtype)
        elif taken.device:
            # Somebody has no array on a GPU: it goes through the host.
            brought, restore = to_numpy(array)
            data = brought if rows else brought.reshape(-1)[:0].view(np.uint8)
            back = Taken([brought], [restore])
        parts, received = yield from _exchanged(call, transport, data, rows, like, index)
        return back.restored_alone(_join([parts[index]], like, received[index]))

    spec = Spec("scatter", root=root, transport=taken.transport)
    return taken.marked(group.call(spec, name, source.nbytes, steps))


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
    """A barrier."""
    group = group_of(process_set, "barrier")

    def steps(call: Call) -> Steps[None]:
        group.choose(call)
        yield from call.agreed()

    return group.call(Spec("barrier"), name, 0, steps)
