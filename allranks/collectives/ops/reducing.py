"""allreduce, reduce and reducescatter, of one array or of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.arrays.adasum import adasum
from allranks.collectives.arrays.compression import Compression
from allranks.collectives.arrays.libraries import Array
from allranks.collectives.arrays.reductions import (
    Adasum,
    Arithmetic,
    Average,
    ReduceOp,
    check,
    name_of,
)
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.callsite import here
from allranks.collectives.calls.guard import Spec, describe_group, pack
from allranks.collectives.calls.transport import Transport
from allranks.collectives.calls.wait import Steps
from allranks.collectives.host.shared import split
from allranks.collectives.ops.handles import Handle
from allranks.collectives.ops.moving import member
from allranks.collectives.ops.taking import Taken, take
from allranks.collectives.world.group import Group
from allranks.collectives.world.process_sets import ProcessSet, group_of
from allranks.errors import UsageError

_PLANS = 1024
_LINE = 64
"""Bytes: arrays of a group begin on such a boundary, so that TensorFlow can take their memory."""


class Plan:
    """What reductions of the same kind, dtypes and shapes have in common, worked out once."""

    def __init__(
        self,
        group: Group,
        kind: str,
        op: ReduceOp,
        factors: tuple[float, float],
        looks: Sequence[tuple[np.dtype[Any], tuple[int, ...]]],
        *,
        root: int = -1,
        compression: str = "",
        labels: Sequence[str] = (),
        taken: Taken | None = None,
    ) -> None:
        dtypes, shapes = [dtype for dtype, _ in looks], [shape for _, shape in looks]
        for dtype in dtypes:
            check(op, dtype)
        _check_shapes(kind, op, shapes, group.size)
        self.transport = group.through_host
        """Where nothing else is asked for, and no array is on a GPU."""
        self.native = True
        """False where arrays of another byte order are given."""
        self.op, self.factors, self.dtypes, self.shapes = op, factors, dtypes, shapes
        sizes = [math.prod(shape) for shape in shapes]
        self.nbytes = sum(n * dtype.itemsize for n, dtype in zip(sizes, dtypes, strict=True))
        self.hows: list[Arithmetic] = []
        found: dict[np.dtype[Any], list[int]] = {}
        # Adasum's is its own, and it takes one array after the other.
        for index, dtype in enumerate(dtypes if op is not Adasum else ()):
            found.setdefault(dtype, []).append(index)
            self.hows.append(Arithmetic(op, dtype, group.size, *factors))
        # On a GPU nothing is taken over that has to be aligned.
        line = 1 if taken is not None and taken.device else _LINE
        self.batches = [
            Batch(where, [shapes[index] for index in where], self.hows[where[0]], group.size, line)
            for where in found.values()
        ]
        """The arrays of each dtype, which move as one."""
        whole = kind == "grouped_allreduce" and op is not Adasum
        names, shown = describe_group([name_of(dtype) for dtype in dtypes], shapes, labels)
        self.spec = Spec(
            kind,
            op.name,
            names,
            shown if kind.startswith("grouped") else shapes[0],
            root,
            *factors,
            compression,
            sum(batch.size for batch in self.batches) if whole else sum(sizes),
            taken.transport if taken is not None else "",
            taken.device if taken is not None else "",
        )
        self.packed = pack(self.spec)


class Batch:
    """Arrays of one dtype, laid out one after the other."""

    def __init__(
        self,
        where: list[int],
        shapes: list[tuple[int, ...]],
        how: Arithmetic,
        ranks: int,
        line: int,
    ) -> None:
        self.where, self.shapes, self.dtype = where, shapes, how.dtype
        step = max(1, line // how.dtype.itemsize) if len(where) > 1 else 1
        self.spans: list[tuple[int, int]] = []
        self.size = 0
        for shape in shapes:
            end = self.size + math.prod(shape)
            self.spans.append((self.size, end))
            self.size = -(-end // step) * step
        self.staging = self.how = how
        if len(where) > 1 and not how.half:
            # They are prescaled on their way here: once, whatever the transport copies.
            self.how = Arithmetic(how.op, how.dtype, ranks, 1.0, how.postscale)

    def parts(self, flat: Array) -> list[Array]:
        """The arrays that lie in ``flat``."""
        return [
            flat[start:end].reshape(shape)
            for (start, end), shape in zip(self.spans, self.shapes, strict=True)
        ]

    def fill(self, flat: Array, parts: list[Array], sources: Sequence[Array]) -> None:
        """Copies the arrays in; what lies between two of them is reduced as well."""
        ends = [start for start, _ in self.spans[1:]] + [self.size]
        for part, source, (_, end), after in zip(parts, sources, self.spans, ends, strict=True):
            self.staging.staged(source, part)
            if end < after:
                flat[end:after] = 0


def _begin(
    kind: str,
    arrays: Sequence[Any],
    op: ReduceOp = Average,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
    transport: str | None = None,
    device: str = "",
    root: int = -1,
    labels: Sequence[str] = (),
) -> Call:
    """A call of this module, ready to be driven; its result is a list."""
    group = group_of(process_set, kind)
    op = ReduceOp(op)
    if kind == "reduce":
        member(group, root, kind)
    factors = float(prescale_factor), float(postscale_factor)
    taken = take(kind, arrays, transport, device, host=op is Adasum)
    pairs = [compression.compress(source) for source in taken.sources]
    sources: list[Array] = [source for source, _ in pairs]
    looks = tuple([(source.dtype, source.shape) for source in sources])
    key = (kind, op._value_, factors, root, compression.name, labels, taken.transport,
           taken.device, looks)  # fmt: skip
    plan: Plan | None = group.plans.get(key)
    if plan is None:
        plan = Plan(
            group, kind, op, factors, looks,
            root=root, compression=compression.name, labels=labels, taken=taken,
        )  # fmt: skip
        _keep(group, key, plan)
    call = Call(group.agreement, plan.spec, here(), name or "", plan.nbytes, plan.packed)
    call.ready = taken.mark()

    def steps() -> Steps[list[Any]]:
        way = group.choose(call, taken.transport, taken.gpu)
        if not sources:
            yield from call.agreed()
        move = _scatter_steps if "reducescatter" in kind else _reduce_steps
        outs = yield from move(group, call, way, sources, plan)
        return [
            restore(compression.decompress(out, context))
            for out, restore, (_, context) in zip(outs, taken.restores, pairs, strict=True)
        ]

    call.steps = steps()
    return call


def _plan_of_one(group: Group, key: tuple[Any, ...], op: ReduceOp, array: Array) -> Plan:
    native = array.dtype.newbyteorder("=")
    looks = [(native, array.shape)]
    plan = Plan(group, "allreduce", op, (float(key[-2]), float(key[-1])), looks)
    plan.native = array.dtype.isnative
    _keep(group, key, plan)
    return plan


def _keep(group: Group, key: object, plan: Plan) -> None:
    if len(group.plans) >= _PLANS:
        group.plans.clear()
    group.plans[key] = plan


def _reduce_steps(
    group: Group, call: Call, transport: Transport, sources: list[Array], plan: Plan
) -> Steps[list[Array]]:
    outs: list[Any] = [None] * len(sources)
    if plan.op is Adasum:
        for index, source in enumerate(sources):
            data = source.reshape(-1).view(np.uint8)
            lengths = [data.nbytes] * group.size
            parts = yield from call.moved(transport.allgather, data, lengths)
            total = adasum([part.view(source.dtype) for part in parts], *plan.factors)
            outs[index] = total.reshape(source.shape)
        return outs
    for batch in plan.batches:
        if len(batch.where) == 1:
            index = batch.where[0]
            outs[index] = yield from call.moved(transport.allreduce, sources[index], batch.how)
            continue
        flat = transport.empty((batch.size,), batch.dtype)
        parts = batch.parts(flat)
        with transport.copying(call):
            batch.fill(flat, parts, [sources[index] for index in batch.where])
        yield from call.moved(transport.allreduce, flat, batch.how, flat)
        for index, part in zip(batch.where, parts, strict=True):
            outs[index] = part
    return outs


def _scatter_steps(
    group: Group, call: Call, transport: Transport, sources: list[Array], plan: Plan
) -> Steps[list[Array]]:
    outs = []
    for source, how in zip(sources, plan.hows, strict=True):
        rows = split(source.shape[0], group.size)
        row = source[0].size if source.shape[0] else 0
        shape = (rows[group.me + 1] - rows[group.me], *source.shape[1:])
        out = transport.empty(shape, source.dtype)
        bounds = [start * row for start in rows]
        flat, into = source.reshape(-1), out.reshape(-1)
        yield from call.moved(transport.reducescatter, flat, bounds, into, how)
        outs.append(out)
    return outs


def _check_shapes(kind: str, op: ReduceOp, shapes: list[tuple[int, ...]], size: int) -> None:
    if op is Adasum and (size & (size - 1) or "reducescatter" in kind):
        raise UsageError(
            f"Adasum needs allreduce on a number of ranks that is a power of two: found {kind} "
            f"on {size}. Use Average."
        )
    if "reducescatter" in kind and () in shapes:
        raise UsageError(
            "reducescatter needs a first dimension to cut: found a scalar. "
            "Use allreduce, or reshape(1)."
        )


def allreduce(
    array: Any,
    op: ReduceOp = Average,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
    transport: str | None = None,
    device: str = "",
) -> Any:
    """Every rank gets the element-wise reduction of all ranks' arrays.

    Integers: Sum and Product wrap around as numpy's do; Average does not up to 32 bits. It, and
    prescale and postscale factors, are computed in float64 and cut towards zero: the average of 1
    and 2 is 1. float16 and bfloat16 are scaled and accumulated in float32. bool: Sum and Max are
    "any", Product and Min are "all".

    Args:
        array: any shape and dtype, the same on every rank; numpy, a number, or any library's
            array, on any device.
        op: Average, Sum, Min, Max, Product or Adasum; the same on every rank.
        name: for the timeline; the call's line where it is None.
        process_set: whose ranks take part; all where it is None.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        compression: `Compression.fp16` halves the bytes of float32.
        transport: "shared" or "mpi", for arrays on a GPU also "nccl" or "staged"; the fastest
            where it is None. "shared" and "mpi" take arrays on a GPU through the host.
        device: "/cpu:0" moves the array through host memory, "/gpu:0" on the GPU; where it is
            when "". ALLRANKS_ALLREDUCE=nccl|staged|mpi says so for every allreduce on a GPU.

    Returns:
        A new array of the kind, dtype, shape and device of the input.

    Raises:
        CollectiveMismatch: the ranks brought different things; nothing has moved.
        RankLeft: a rank will never call this.

    Collective over the process set: all of its ranks call this, with the same arguments but for
    values and ``name``.
    """
    if (
        type(array) is np.ndarray
        and type(op) is ReduceOp
        and op is not Adasum
        and transport is None
        and not device
        and compression is Compression.none
    ):
        # numpy's arrays need no taking.
        this = world.current()
        group = this.groups[0] if process_set is None else group_of(process_set, "allreduce")
        key = op._value_, array.dtype, array.shape, prescale_factor, postscale_factor
        plan = group.plans.get(key) or _plan_of_one(group, key, op, array)
        call = Call(group.agreement, plan.spec, here(), name or "", plan.nbytes, plan.packed)
        if not plan.native:
            array = array.astype(plan.dtypes[0])
        call.transport = plan.transport.name
        call.move, call.arguments = plan.transport.allreduce, (array, plan.hows[0])
        return this.run(call)
    call = _begin(
        "allreduce",
        [array],
        op,
        name=name,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
        transport=transport,
        device=device,
    )
    return world.current().run(call)[0]


def allreduce_async(array: Any, op: ReduceOp = Average, **options: Any) -> Handle:
    """Posts an `allreduce`; `synchronize` returns its result. The array must not change before."""
    return Handle(_begin("allreduce", [array], op, **options), _one)


def grouped_allreduce(arrays: Sequence[Any], op: ReduceOp = Average, **options: Any) -> list[Any]:
    """Every rank gets the reductions of a list of arrays, moved together: one wait for all.

    Args:
        arrays: as many, of the same shapes and dtypes, on every rank; dtypes may be mixed.
        op: as in `allreduce`.
        **options: as in `allreduce`.

    Collective over the process set.
    """
    result: list[Any] = world.current().run(_begin("grouped_allreduce", arrays, op, **options))
    return result


def grouped_allreduce_async(
    arrays: Sequence[Any], op: ReduceOp = Average, **options: Any
) -> Handle:
    """Posts a `grouped_allreduce`; `synchronize` returns its results."""
    return Handle(_begin("grouped_allreduce", arrays, op, **options))


def reducescatter(array: Any, op: ReduceOp = Average, **options: Any) -> Any:
    """Every rank gets its share, along the first dimension, of the reduction of all arrays.

    Args:
        array: shape (rows, ...), the same on every rank.
        op: Average, Sum, Min, Max or Product.
        **options: as in `allreduce`.

    Returns:
        Shape (rows // size, ...); the first ``rows % size`` ranks get one row more.

    Collective over the process set.
    """
    return world.current().run(_begin("reducescatter", [array], op, **options))[0]


def reducescatter_async(array: Any, op: ReduceOp = Average, **options: Any) -> Handle:
    """Posts a `reducescatter`; `synchronize` returns its result."""
    return Handle(_begin("reducescatter", [array], op, **options), _one)


def grouped_reducescatter(
    arrays: Sequence[Any], op: ReduceOp = Average, **options: Any
) -> list[Any]:
    """Every rank gets its shares of the reductions of a list of arrays.

    Collective over the process set.
    """
    result: list[Any] = world.current().run(_begin("grouped_reducescatter", arrays, op, **options))
    return result


def grouped_reducescatter_async(
    arrays: Sequence[Any], op: ReduceOp = Average, **options: Any
) -> Handle:
    """Posts a `grouped_reducescatter`; `synchronize` returns its results."""
    return Handle(_begin("grouped_reducescatter", arrays, op, **options))


def reduce(array: Any, root: int = 0, op: ReduceOp = Average, **options: Any) -> Any:
    """The root gets the element-wise reduction of all ranks' arrays, the others get None.

    Args:
        array: as in `allreduce`.
        root: a rank of the world, the same on every rank.
        op: as in `allreduce`.
        **options: as in `allreduce`.

    Collective over the process set.
    """
    result = world.current().run(_begin("reduce", [array], op, root=root, **options))[0]
    return result if world.current().rank == root else None


def reduce_async(array: Any, root: int = 0, op: ReduceOp = Average, **options: Any) -> Handle:
    """Posts a `reduce`; `synchronize` returns its result."""
    mine = world.current().rank == root
    return Handle(
        _begin("reduce", [array], op, root=root, **options), _one if mine else lambda results: None
    )


def _one(results: list[Any]) -> Any:
    return results[0]
