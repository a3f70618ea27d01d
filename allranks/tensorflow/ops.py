"""Collectives on tensors, by Horovod's names, with Horovod's gradients. Runs in every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.collectives import Average, ProcessSet, ReduceOp, Sum, global_process_set
from allranks.errors import UsageError
from allranks.tensorflow import fused, sparse
from allranks.tensorflow.average import chosen_op
from allranks.tensorflow.compression import Compression
from allranks.tensorflow.crossing import Array, cross

Function = Callable[..., Sequence[Any]]


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
        device_dense: accepted; the ranks' host memory or GPUs meet in `allranks.collectives`.
        device_sparse: accepted, as device_dense.
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
        CollectiveMismatch: the ranks brought different things; nothing has moved.
        RankLeft: a rank will never call this.

    Collective over the process set.
    """
    kind = chosen_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        if prescale_factor != 1.0 or postscale_factor != 1.0:
            raise NotImplementedError(
                "allreduce of tf.IndexedSlices needs factors of 1: it gathers rows. "
                "Scale the values yourself, or pass tf.convert_to_tensor(slices)."
            )
        return sparse.allreduce([tensor], kind, process_set, name)[0]
    return grouped_allreduce(
        [tensor],
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

    Collective over the process set.
    """
    kind = chosen_op(op, average)
    dense = {i: t for i, t in enumerate(tensors) if not isinstance(t, tf.IndexedSlices)}
    rows = {i: t for i, t in enumerate(tensors) if i not in dense}
    outs: list[Any] = list(tensors)
    packed, contexts = [], []
    for tensor in dense.values():
        small, context = compression.compress(tf.convert_to_tensor(tensor))
        packed.append(small)
        contexts.append(context)
    made = _reduced(packed, kind, prescale_factor, postscale_factor, process_set, name)
    for index, tensor, context in zip(dense, made, contexts, strict=True):
        outs[index] = compression.decompress(tensor, context)
    if rows:
        gathered = sparse.allreduce(list(rows.values()), kind, process_set, name)
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
        return _reduced(gradients, op, prescale, postscale, process_set, name)

    return _differentiable(
        move, back, tensors, [_like(tensor) for tensor in tensors], name, process_set
    )


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Every rank gets all ranks' tensors, one after the other along the first dimension.

    Args:
        tensor: (rows, ...): rows may differ between ranks, the rest and the dtype may not.
        name: for the timeline.
        ignore_name_scope: accepted.
        process_set: whose ranks take part.

    Returns:
        (sum of rows, ...), the same on every rank. Its gradient is this rank's rows of the
        average of the ranks' gradients.

    Collective over the process set.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every rank gets the allgathers of a list of tensors, moved together: one wait for all.

    Collective over the process set.
    """
    sources = [tf.convert_to_tensor(tensor) for tensor in tensors]
    options: dict[str, Any] = {"process_set": process_set, "name": name}

    def move(*arrays: Array) -> Sequence[Any]:
        if len(arrays) == 1:
            return [collectives.allgather(arrays[0], **options)]
        return collectives.grouped_allgather(arrays, **options)

    def own(*arrays: Array) -> Sequence[Any]:
        gradients, rows = arrays[: len(sources)], arrays[len(sources) :]
        counts = collectives.allgather(np.array(rows, np.int64).reshape(1, -1), **options)
        ends = np.cumsum(counts, axis=0)[process_set.rank()]
        whole = collectives.grouped_allreduce(gradients, Average, **options)
        return [
            g[end - n : end] for g, end, n in zip(whole, ends.tolist(), map(int, rows), strict=True)
        ]

    def back(*gradients: Any) -> Any:
        rows = [tf.shape(source)[0] for source in sources]
        return cross(own, [*gradients, *rows], list(map(_like, sources)), name, process_set)

    specs = [_like(source, rows=None) for source in sources]
    return _differentiable(move, back, sources, specs, name, process_set) if sources else []


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Every rank gets the root's tensor.

    Args:
        tensor: any shape and dtype, the same on every rank.
        root_rank: a rank of the world, in a process set too; the same on every rank.
        name: for the timeline.
        ignore_name_scope: accepted.
        process_set: whose ranks take part.

    Returns:
        A tensor like the input. Its gradient is the average of the ranks' gradients on the root,
        and zero elsewhere.

    Collective over the process set.
    """
    source = tf.convert_to_tensor(tensor)
    root = int(root_rank)
    options: dict[str, Any] = {"process_set": process_set, "name": name}

    def move(array: Array) -> Sequence[Any]:
        return [collectives.broadcast(array, root, **options)]

    def collect(gradient: Array) -> Sequence[Any]:
        mean = collectives.allreduce(gradient, Average, **options)
        return [mean if collectives.rank() == root else np.zeros_like(mean)]

    def back(gradient: Any) -> Any:
        return cross(collect, [gradient], [_like(gradient)], name, process_set)

    return _differentiable(move, back, [source], [_like(source)], name, process_set)[0]


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
        device_dense: accepted.
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
    kind = ReduceOp(op)
    packed = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    sources = [tensor for tensor, _ in packed]
    options: dict[str, Any] = {"process_set": process_set, "name": name}
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    specs = [_like(source, rows=None) for source in sources]

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

    made = _differentiable(move, back, sources, specs, name, process_set)
    contexts = [context for _, context in packed]
    return [compression.decompress(t, c) for t, c in zip(made, contexts, strict=True)]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Every rank sends each rank a piece of its tensor and gets a piece from each.

    Args:
        tensor: (rows, ...): rows may differ between ranks, the rest and the dtype may not.
        splits: how many rows go to each rank, (size,) int32; equal pieces where it is None.
        name: for the timeline.
        ignore_name_scope: accepted.
        process_set: whose ranks take part.

    Returns:
        The pieces in the order of the ranks they come from, (received rows, ...); with ``splits``
        a pair of that and the rows received from each rank, (size,) int32. The gradient sends
        every piece's gradient back to where the piece came from.

    Collective over the process set.
    """
    source = tf.convert_to_tensor(tensor)
    pieces, received = _exchange(source, splits, name, process_set)
    return pieces if splits is None else (pieces, received)


def _exchange(source: Any, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
    options: dict[str, Any] = {"process_set": process_set, "name": name}
    size = process_set.size()

    def move(array: Array, *given: Array) -> Sequence[Any]:
        if given:
            pieces, received = collectives.alltoall(array, given[0], **options)
            return [pieces, np.asarray(received, np.int32)]
        rows = array.shape[0] if array.ndim else 0
        pieces = collectives.alltoall(array, **options)
        return [pieces, np.full(size, rows // size, np.int32)]

    specs = [_like(source, rows=None), tf.TensorSpec([size], tf.int32)]
    cuts = [] if splits is None else [tf.convert_to_tensor(splits, tf.int32)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(tensor: Any) -> Any:
        pieces, received = cross(move, [tensor, *cuts], specs, name, process_set)

        def back(gradient: Any, _received: Any = None) -> Any:
            returned = _exchange(gradient, received, name, process_set)[0]
            return tf.ensure_shape(returned, source.shape)

        return (pieces, received), back

    return run(source)


def join() -> Any:
    """This rank has no more data: until all ranks have joined, it brings zeros to allreduces.

    Returns:
        The rank that joined last, an int32 tensor.

    Collective over all ranks.
    """

    def wait() -> Sequence[Any]:
        last = collectives.join()
        fused.disagree()
        return [np.int32(last)]

    return cross(wait, [], [tf.TensorSpec([], tf.int32)], "join")[0]


def _like(tensor: Any, **first: Any) -> Any:
    """The shape and dtype of a tensor; ``rows=None`` leaves its first dimension open."""
    shape = tensor.shape
    if first and shape.rank:
        shape = tf.TensorShape([None]).concatenate(shape[1:])
    return tf.TensorSpec(shape, tensor.dtype)


def _differentiable(
    move: Function,
    back: Callable[..., Any],
    tensors: Sequence[Any],
    specs: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    """The tensors that ``move`` makes; ``back`` makes the inputs' gradients from theirs."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*inputs: Any) -> Any:
        return cross(move, inputs, specs, name, process_set), back

    return list(run(*tensors))
