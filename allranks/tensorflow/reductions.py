"""Reductions of tensors: allreduce and reducescatter, one or many. Runs in every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from allranks import collectives
from allranks.collectives import Average, ProcessSet, ReduceOp, Sum, global_process_set
from allranks.errors import UsageError
from allranks.tensorflow import compression as compressions
from allranks.tensorflow import sparse
from allranks.tensorflow.average import chosen_op, meant
from allranks.tensorflow.compression import Compression
from allranks.tensorflow.crossing import Array, like
from allranks.tensorflow.differentiable import differentiable
from allranks.tensorflow.gathers import grouped_allgather


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Every rank gets the element-wise reduction of all ranks' tensors.

    Args:
        tensor: any shape and dtype, the same on every rank; or ``tf.IndexedSlices``, whose rows
            are gathered, so that ranks may bring different ones.
        average: Horovod's former way to say ``op=Average`` or ``op=Sum``.
        device_dense: where dense tensors meet those of the other ranks: ``/cpu:0`` is host
            memory, ``/gpu:0`` the GPU, where there is one; "" is where they are.
        device_sparse: the same for the rows of ``tf.IndexedSlices``.
        compression: `Compression.fp16` halves the bytes of float32.
        op: Average where it is None; Sum, Adasum, Min, Max, Product; the same on every rank.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        name: for the timeline.
        process_set: whose ranks take part.
        ignore_name_scope: accepted; names do not match calls here, their order does.

    Returns:
        A tensor like the input. Its gradient is the same reduction of the ranks' gradients.

    Raises:
        NotImplementedError: of slices, another reduction than Average and Sum, or a factor.
        CollectiveMismatch: the ranks brought different things; nothing has moved.
        RankLeft: a rank will never call this.

    Collective over the process set.
    """
    kind = chosen_op(op, average)
    return grouped_allreduce(
        [tensor],
        device_dense=device_dense,
        device_sparse=device_sparse,
        op=kind,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Every rank gets the reductions of a list of tensors, moved together: one wait for all.

    Args:
        tensors: as many, of the same shapes and dtypes, on every rank; dtypes may be mixed, and
            some may be ``tf.IndexedSlices``.
        average: as in `allreduce`, with all that follows.

    Raises:
        NotImplementedError: there are slices, and the reduction, or a factor, is not for them;
            nothing has moved.

    Collective over the process set.
    """
    kind = chosen_op(op, average)
    compressions.check(compression)
    dense = {i: t for i, t in enumerate(tensors) if not isinstance(t, tf.IndexedSlices)}
    rows = {i: t for i, t in enumerate(tensors) if i not in dense}
    if rows:
        sparse.check(kind, prescale_factor, postscale_factor)
    outs: list[Any] = list(tensors)
    packed, contexts = [], []
    for tensor in dense.values():
        small, context = compression.compress(tf.convert_to_tensor(tensor))
        packed.append(small)
        contexts.append(context)
    factors = prescale_factor, postscale_factor
    made = _reduced(packed, kind, *factors, process_set, name, device_dense)
    for index, tensor, context in zip(dense, made, contexts, strict=True):
        outs[index] = compression.decompress(tensor, context)
    if rows:
        gathered = sparse.allreduce(list(rows.values()), kind, process_set, name, device_sparse)
        for index, slices in zip(rows, gathered, strict=True):
            outs[index] = slices
    return outs


def _reduced(
    tensors: Sequence[Any],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None,
    device: str,
) -> list[Any]:
    """The reductions of dense tensors, and as their gradients those of the gradients."""
    if not tensors:
        return []
    options: dict[str, Any] = {
        "prescale_factor": float(prescale),
        "postscale_factor": float(postscale),
        "process_set": process_set,
        "name": name,
    }

    def move(*arrays: Array) -> Sequence[Any]:
        if len(arrays) == 1:
            return [collectives.allreduce(arrays[0], op, **options)]
        return collectives.grouped_allreduce(arrays, op, **options)

    def back(*gradients: Any) -> Any:
        return _reduced(gradients, op, prescale, postscale, process_set, name, device)

    return differentiable(
        move, back, tensors, [like(tensor) for tensor in tensors], name, process_set, device
    )


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Every rank gets its share, along the first dimension, of the reduction of all tensors.

    Args:
        tensor: (rows, ...), the same on every rank.
        device_dense: as in `allreduce`.
        compression: as in `allreduce`.
        op: Average or Sum; also Min, Max and Product, which have no gradient.
        name: for the timeline.
        process_set: whose ranks take part.
        ignore_name_scope: accepted.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.

    Returns:
        (rows // size, ...); the first ``rows % size`` ranks get one row more.

    Collective over the process set.
    """
    return grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        name,
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Every rank gets its shares of the reductions of a list of tensors, as `reducescatter`.

    Collective over the process set.
    """
    if not tensors:
        return []
    kind = meant(op)
    compressions.check(compression)
    packed = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    sources = [tensor for tensor, _ in packed]
    options: dict[str, Any] = {"process_set": process_set, "name": name}
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    specs = [like(source, open_rows=True) for source in sources]

    def move(*arrays: Array) -> Sequence[Any]:
        return collectives.grouped_reducescatter(arrays, kind, **options, **factors)

    def back(*gradients: Any) -> Any:
        if kind not in (Average, Sum):
            raise UsageError(
                f"reducescatter has a gradient for Average and Sum only: found {kind.name}. "
                "Stop the gradient: tf.stop_gradient(x)."
            )
        factor = prescale_factor * postscale_factor
        if kind is Sum:
            factor *= process_set.size()
        scaled = [g * tf.cast(factor, g.dtype) for g in gradients]
        whole = grouped_allgather(scaled, name, process_set=process_set)
        return [tf.ensure_shape(g, source.shape) for g, source in zip(whole, sources, strict=True)]

    made = differentiable(move, back, sources, specs, name, process_set, device_dense)
    contexts = [context for _, context in packed]
    return [compression.decompress(t, c) for t, c in zip(made, contexts, strict=True)]
