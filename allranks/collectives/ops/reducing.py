"""allreduce, reduce and reducescatter, of one array or of a group. Runs in every rank."""

from __future__ import annotations

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
from allranks.collectives.calls.guard import Shapes, Spec, describe_group
from allranks.collectives.calls.transport import Transport
from allranks.collectives.calls.wait import Steps
from allranks.collectives.host.shared import split
from allranks.collectives.ops.express import express
from allranks.collectives.ops.handles import Handle
from allranks.collectives.ops.moving import member
from allranks.collectives.ops.taking import take
from allranks.collectives.world.group import Group
from allranks.collectives.world.process_sets import ProcessSet, group_of
from allranks.errors import UsageError


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
    shapes: Shapes | None = None,
    labels: Sequence[str] = (),
) -> Call:
    """A call of this module, ready to be driven; its result is a list."""
    group = group_of(process_set, kind)
    op = ReduceOp(op)
    if kind == "reduce":
        member(group, root, kind)
    prescale_factor, postscale_factor = float(prescale_factor), float(postscale_factor)
    taken = take(kind, arrays, transport, device, host=op is Adasum)
    sources: list[Array] = []
    contexts: list[Any] = []
    for array in taken.sources:
        source, context = compression.compress(array)
        check(op, source.dtype)
        sources.append(source)
        contexts.append(context)
    _check_shapes(kind, op, sources, group.size)
    dtypes, looks = describe_group(
        [name_of(source.dtype) for source in sources], [source.shape for source in sources], labels
    )
    spec = Spec(
        kind,
        op.name,
        dtypes,
        looks if kind.startswith("grouped") else shapes or sources[0].shape,
        root,
        prescale_factor,
        postscale_factor,
        compression.name,
        sum(source.size for source in sources),
        taken.transport,
        taken.device,
    )
    call = group.call(spec, name or "", sum(source.nbytes for source in sources))
    call.ready = taken.mark()
    factors = (prescale_factor, postscale_factor)
    reduce = _scatter_steps if "reducescatter" in kind else _reduce_steps

    def steps() -> Steps[list[Any]]:
        transport = group.choose(call, taken.transport, taken.gpu)
        if not sources:
            yield from call.agreed()
        outs = yield from reduce(group, call, transport, sources, op, factors)
        return [
            restore(compression.decompress(out, context))
            for out, restore, context in zip(outs, taken.restores, contexts, strict=True)
        ]

    call.steps = steps()
    return call


def _reduce_steps(
    group: Group,
    call: Call,
    transport: Transport,
    sources: list[Array],
    op: ReduceOp,
    factors: tuple[float, float],
) -> Steps[list[Array]]:
    outs: list[Any] = []
    if op is Adasum:
        for source in sources:
            data = source.reshape(-1).view(np.uint8)
            lengths = [data.nbytes] * group.size
            parts = yield from call.moved(transport.allgather(call, data, lengths))
            total = adasum([part.view(source.dtype) for part in parts], *factors)
            outs.append(total.reshape(source.shape))
        return outs
    outs = [None] * len(sources)
    for where in _by_dtype(sources):
        how = Arithmetic(op, sources[where[0]].dtype, group.size, *factors)
        first = sources[where[0]]
        if len(where) == 1:
            out = outs[where[0]] = transport.empty(first.shape, first.dtype)
            source, total = first.reshape(-1), out.reshape(-1)
        else:
            count = sum(sources[i].size for i in where)
            source = total = transport.empty((count,), first.dtype)
            with transport.copying(call):
                start = 0
                for i in where:
                    end = start + sources[i].size
                    outs[i] = total[start:end].reshape(sources[i].shape)
                    how.staged(sources[i], outs[i])
                    start = end
            if not how.half:
                # They have been prescaled on their way: once, whatever the transport copies.
                how = Arithmetic(op, first.dtype, group.size, 1.0, factors[1])
        yield from call.moved(transport.allreduce(call, source, total, how))
    return outs


def _scatter_steps(
    group: Group,
    call: Call,
    transport: Transport,
    sources: list[Array],
    op: ReduceOp,
    factors: tuple[float, float],
) -> Steps[list[Array]]:
    outs = []
    for source in sources:
        rows = split(source.shape[0], group.size)
        row = source[0].size if source.shape[0] else 0
        shape = (rows[group.me + 1] - rows[group.me], *source.shape[1:])
        out = transport.empty(shape, source.dtype)
        how = Arithmetic(op, source.dtype, group.size, *factors)
        bounds = [start * row for start in rows]
        flat, into = source.reshape(-1), out.reshape(-1)
        yield from call.moved(transport.reducescatter(call, flat, bounds, into, how))
        outs.append(out)
    return outs


def _check_shapes(kind: str, op: ReduceOp, sources: list[Array], size: int) -> None:
    if op is Adasum and (size & (size - 1) or "reducescatter" in kind):
        raise UsageError(
            f"Adasum needs allreduce on a number of ranks that is a power of two: found {kind} "
            f"on {size}. Use Average."
        )
    if "reducescatter" in kind and any(source.ndim == 0 for source in sources):
        raise UsageError(
            "reducescatter needs a first dimension to cut: found a scalar. "
            "Use allreduce, or reshape(1)."
        )


def _by_dtype(sources: list[Array]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for index, source in enumerate(sources):
        found.setdefault(name_of(source.dtype), []).append(index)
    return list(found.values())


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
    factors = (float(prescale_factor), float(postscale_factor))
    plain = type(array) is np.ndarray and transport is None and not device
    if plain and compression is Compression.none:
        group = group_of(process_set, "allreduce")
        done = express(world.current(), group, array, op, factors, name)
        if done is not None:
            return done
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


def allreduce_fused(
    array: Array,
    shapes: Shapes,
    op: ReduceOp,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """As `allreduce`, of an array in which several lie: the ranks compare ``shapes``, theirs."""
    factors = (float(prescale_factor), float(postscale_factor))
    group = group_of(process_set, "allreduce")
    total = express(world.current(), group, array, op, factors, name, shapes)
    if total is None:
        total = world.current().run(
            _begin(
                "allreduce",
                [array],
                op,
                name=name,
                process_set=process_set,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                shapes=shapes,
            )
        )[0]
    return total


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
