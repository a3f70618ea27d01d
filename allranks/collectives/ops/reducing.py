"""allreduce, reduce and reducescatter, of one array or of a group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.arrays.adasum import adasum
from allranks.collectives.arrays.compression import Compression
from allranks.collectives.arrays.reductions import Adasum, Array, Average, ReduceOp
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.transport import Transport
from allranks.collectives.calls.wait import Steps
from allranks.collectives.host.shared_memory import keep, split
from allranks.collectives.ops.handles import Handle, first, run
from allranks.collectives.ops.plans import Plan, plan_of
from allranks.collectives.ops.taking import Taken, take
from allranks.collectives.world import world as worlds
from allranks.collectives.world.group import Group
from allranks.collectives.world.process_sets import ProcessSet, group_of
from allranks.errors import UsageError

_MEANT = {
    **{op.name.lower(): op.name for op in ReduceOp},
    **{"mean": "Average", "avg": "Average", "prod": "Product", "multiply": "Product"},
    **{"amin": "Min", "minimum": "Min", "amax": "Max", "maximum": "Max"},
}
"""The reductions by what other libraries call them."""


def _begin(
    kind: str,
    arrays: Sequence[Any],
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
    transport: str | None = None,
    device: str = "",
    *,
    root: int = -1,
    labels: Sequence[str] = (),
) -> Call:
    """A call of this module, ready to be driven; its result is a list."""
    group = group_of(process_set, kind)
    op = op_of(kind, op)
    if kind == "reduce":
        group.index(root, kind)
    factors = _factor(kind, prescale_factor), _factor(kind, postscale_factor)
    compress, compressed = _compressor(kind, compression)
    taken = take(kind, arrays, transport, device, host=op is Adasum)
    pairs = [compress(source) for source in taken.sources]
    sources: list[Array] = [source for source, _ in pairs]
    looks = tuple([(source.dtype, source.shape) for source in sources])
    plan = plan_of(
        group, kind, op, looks, factors, root, compressed, labels,
        taken.transport, taken.device,
    )  # fmt: skip
    call = Call(group.agreement, plan.packed, name, plan.nbytes)

    def steps() -> Steps[list[Any]]:
        way = group.choose(call, taken.transport, taken.gpu)
        if not sources:
            yield from call.agreed()
        move = _scatter_steps if "reducescatter" in kind else _reduce_steps
        outs = yield from move(group, call, way, taken, sources, plan)
        if compression is not Compression.none:
            given = zip(outs, pairs, strict=True)
            outs = [compression.decompress(out, context) for out, (_, context) in given]
        return taken.restored(outs)

    call.steps = steps()
    return taken.marked(call)


def op_of(kind: str, op: Any) -> ReduceOp:
    """The reduction that is meant.

    Raises:
        UsageError: it is none.
    """
    try:
        return ReduceOp(op)
    except (ValueError, TypeError):
        found = _of_mpi(op)
        if found is not None:
            return found
        meant = str(op if isinstance(op, str) else getattr(op, "__name__", "")).lower()
        raise UsageError(
            f"{kind} expected op Sum, Average, Min, Max or Product, found {op!r:.60}. "
            f"Type: {kind}(x, op={_MEANT.get(meant, 'Sum')})"
        ) from None


def _of_mpi(op: Any) -> ReduceOp | None:
    """The reduction that an operation of mpi4py's stands for, as MPI.SUM; None for any other."""
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None or not isinstance(op, MPI.Op):
        return None
    same = {"SUM": "Sum", "PROD": "Product", "MIN": "Min", "MAX": "Max"}
    return next((ReduceOp[ours] for name, ours in same.items() if op == getattr(MPI, name)), None)


def _factor(kind: str, factor: Any) -> float:
    try:
        return float(factor)
    except (ValueError, TypeError):
        raise UsageError(
            f"{kind} expected a number for prescale_factor and postscale_factor, found "
            f"{factor!r:.60}. Type for example: {kind}(x, prescale_factor=0.5)"
        ) from None


def _compressor(kind: str, compression: Any) -> tuple[Callable[[Array], Any], str]:
    """What compresses an array, and by which name the ranks compare it."""
    try:
        return compression.compress, compression.name
    except AttributeError:
        raise UsageError(
            f"{kind} expected compression Compression.none or Compression.fp16, found "
            f"{compression!r:.60}. Type: {kind}(x, compression=Compression.fp16)"
        ) from None


def _reduce_steps(
    group: Group, call: Call, transport: Transport, taken: Taken, sources: list[Array], plan: Plan
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
        mine = [sources[index] for index in batch.where]
        with taken.copying(call):
            if batch.in_one_copy:
                batch.fill_in_one_copy(flat, mine)
            else:
                batch.fill(flat, parts, mine)
        yield from call.moved(transport.allreduce, flat, batch.how, flat)
        for index, part in zip(batch.where, parts, strict=True):
            outs[index] = part
    return outs


def _scatter_steps(
    group: Group, call: Call, transport: Transport, taken: Taken, sources: list[Array], plan: Plan
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
    prescale and postscale factors, are computed in float64 and truncated towards zero: the average
    of 1 and 2 is 1. float16 and bfloat16 are scaled and accumulated in float32. bool: Sum and Max
    are "any", Product and Min are "all".

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
        CollectiveMismatch: the ranks passed different arguments; no data was moved.
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
        this = worlds.process or world.current()
        group = this.groups[0] if process_set is None else group_of(process_set, "allreduce")
        key = op._value_, array.dtype, array.shape, prescale_factor, postscale_factor
        plan: Plan | None = group.plans.get(key)
        if plan is None:
            array, plan = _plan_of_one(group, key, op, array)
        call = Call(group.agreement, plan.packed, name, plan.nbytes)
        call.transport = plan.transport
        return this.run(call, plan.move, array, plan.hows[0])
    call = _begin(
        "allreduce", [array], op, name, process_set, prescale_factor, postscale_factor,
        compression, transport, device,
    )  # fmt: skip
    return run(call)[0]


def _plan_of_one(
    group: Group, key: tuple[Any, ...], op: ReduceOp, array: Array
) -> tuple[Array, Plan]:
    """The array, in native byte order, and the plan of its allreduce."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
        key = (key[0], array.dtype, *key[2:])
    looks = ((array.dtype, array.shape),)
    factors = _factor("allreduce", key[-2]), _factor("allreduce", key[-1])
    plan: Plan | None = group.plans.get(key)
    return array, plan or keep(group.plans, key, Plan(group, "allreduce", op, looks, factors))


def allreduce_async(array: Any, op: ReduceOp = Average, **options: Any) -> Handle:
    """Posts an `allreduce`; `synchronize` returns its result. The array must not change before."""
    return Handle(_begin("allreduce", [array], op, **options), first)


def grouped_allreduce(arrays: Sequence[Any], op: ReduceOp = Average, **options: Any) -> list[Any]:
    """Every rank gets the reductions of a list of arrays, moved together: one wait for all.

    Args:
        arrays: as many, of the same shapes and dtypes, on every rank; dtypes may be mixed.
        op: as in `allreduce`.
        **options: as in `allreduce`.

    Collective over the process set.
    """
    result: list[Any] = run(_begin("grouped_allreduce", arrays, op, **options))
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
    return run(_begin("reducescatter", [array], op, **options))[0]


def reducescatter_async(array: Any, op: ReduceOp = Average, **options: Any) -> Handle:
    """Posts a `reducescatter`; `synchronize` returns its result."""
    return Handle(_begin("reducescatter", [array], op, **options), first)


def grouped_reducescatter(
    arrays: Sequence[Any], op: ReduceOp = Average, **options: Any
) -> list[Any]:
    """Every rank gets its shares of the reductions of a list of arrays.

    Collective over the process set.
    """
    result: list[Any] = run(_begin("grouped_reducescatter", arrays, op, **options))
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
    result = run(_begin("reduce", [array], op, root=root, **options))[0]
    return result if world.current().rank == root else None


def reduce_async(array: Any, root: int = 0, op: ReduceOp = Average, **options: Any) -> Handle:
    """Posts a `reduce`; `synchronize` returns its result."""
    mine = world.current().rank == root
    return Handle(
        _begin("reduce", [array], op, root=root, **options), first if mine else lambda results: None
    )
