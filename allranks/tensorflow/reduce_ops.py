"""allreduce and reducescatter on tensors and ``tf.IndexedSlices``. Runs in every rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from allranks import collectives
from allranks.collectives import Average, ProcessSet, ReduceOp, Sum, global_process_set
from allranks.collectives.ops.reducing import op_of
from allranks.errors import UsageError
from allranks.tensorflow import compression as compressions
from allranks.tensorflow.compression import Compression
from allranks.tensorflow.gather_ops import grouped_allgather
from allranks.tensorflow.tf_bridge import HOST, Array, call_on_arrays, differentiable, spec_of


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
    """Returns the element-wise reduction of all ranks' tensors.

    Args:
        tensor: any shape and dtype, the same on every rank; or ``tf.IndexedSlices``, whose rows
            are gathered and may differ between ranks.
        average: the deprecated form of ``op=Average`` or ``op=Sum``.
        device_dense: the device where dense tensors are reduced: ``/cpu:0`` for host memory,
            ``/gpu:0`` for the GPU, if there is one; "" for the tensor's own device.
        device_sparse: the same for the rows of ``tf.IndexedSlices``.
        compression: `Compression.fp16` halves the bytes of float32.
        op: Average (default), Sum, Adasum, Min, Max or Product; the same on every rank.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        name: for the timeline.
        process_set: the ranks that take part.
        ignore_name_scope: ignored, because calls are matched by order, not by name.

    Returns:
        A tensor of the input's shape and dtype. Its gradient is the same reduction of the ranks'
        gradients.

    Raises:
        NotImplementedError: for slices, another reduction than Average and Sum, or a factor.
        CollectiveMismatch: the ranks passed different arguments; nothing was sent.
        RankLeft: a rank has left the cell and will not call this.

    Collective over the process set.
    """
    kind = op_or_average(op, average)
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
    """Returns the reduction of each tensor of a list, in one call that waits only once.

    Args:
        tensors: the same number, shapes and dtypes on every rank; dtypes may be mixed, and some
            may be ``tf.IndexedSlices``.
        average: this and the other arguments are as in `allreduce`.

    Raises:
        NotImplementedError: there are slices, and the reduction or a factor is not defined for
            slices; nothing was sent.

    Collective over the process set.
    """
    # All arguments are checked before data is sent, so that all ranks raise or none does.
    kind = op_or_average(op, average)
    compressions.check(compression)
    dense = {i: t for i, t in enumerate(tensors) if not isinstance(t, tf.IndexedSlices)}
    slices = {i: t for i, t in enumerate(tensors) if i not in dense}
    if slices:
        check_slices(kind, prescale_factor, postscale_factor)
    outs: list[Any] = list(tensors)
    packed, contexts = [], []
    for tensor in dense.values():
        small, context = compression.compress(tf.convert_to_tensor(tensor))
        packed.append(small)
        contexts.append(context)
    factors = prescale_factor, postscale_factor
    made = _allreduce_dense(packed, kind, *factors, process_set, name, device_dense)
    for index, tensor, context in zip(dense, made, contexts, strict=True):
        outs[index] = compression.decompress(tensor, context)
    if slices:
        whole = _allreduce_slices(list(slices.values()), kind, process_set, name, device_sparse)
        for index, one in zip(slices, whole, strict=True):
            outs[index] = one
    return outs


def _allreduce_dense(
    tensors: Sequence[Any],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None,
    device: str,
) -> list[Any]:
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
        return _allreduce_dense(gradients, op, prescale, postscale, process_set, name, device)

    specs = [spec_of(tensor) for tensor in tensors]
    return differentiable(move, back, tensors, specs, name, process_set, device)


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
    """Returns this rank's part, along the first dimension, of the reduction of all tensors.

    Args:
        tensor: (rows, ...), the same on every rank.
        device_dense: as in `allreduce`.
        compression: as in `allreduce`.
        op: Average or Sum; also Min, Max and Product, which have no gradient.
        name: for the timeline.
        process_set: the ranks that take part.
        ignore_name_scope: ignored.
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
    """Returns the `reducescatter` of each tensor of a list, in one call that waits only once.

    Collective over the process set.
    """
    if not tensors:
        return []
    kind = _op(op)
    compressions.check(compression)
    packed = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    sources = [tensor for tensor, _ in packed]
    options: dict[str, Any] = {"process_set": process_set, "name": name}
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    specs = [spec_of(source, open_rows=True) for source in sources]

    def move(*arrays: Array) -> Sequence[Any]:
        return collectives.grouped_reducescatter(arrays, kind, **options, **factors)

    def back(*gradients: Any) -> Any:
        if kind not in (Average, Sum):
            raise UsageError(
                f"reducescatter has a gradient for Average and Sum only: found {kind.name}. "
                "Stop the gradient: tf.stop_gradient(x)."
            )
        # As in Horovod, the gradient of a sum is the size times the gradient of an average.
        factor = prescale_factor * postscale_factor
        if kind is Sum:
            factor *= process_set.size()
        scaled = [g * tf.cast(factor, g.dtype) for g in gradients]
        whole = grouped_allgather(scaled, name, process_set=process_set)
        return [tf.ensure_shape(g, source.shape) for g, source in zip(whole, sources, strict=True)]

    made = differentiable(move, back, sources, specs, name, process_set, device_dense)
    contexts = [context for _, context in packed]
    return [compression.decompress(t, c) for t, c in zip(made, contexts, strict=True)]


def op_or_average(op: ReduceOp | None, average: bool | None) -> Any:
    """Returns the reduction that ``op`` or the deprecated ``average`` names; else Average.

    Raises:
        ValueError: both are given.
    """
    if average is None:
        return Average if op is None else _op(op)
    if op is not None:
        raise ValueError("op= and average= say the same thing: found both. Pass op= alone.")
    warnings.warn("average= is deprecated: pass op=Average or op=Sum.", DeprecationWarning, 3)
    return Average if average else Sum


def _op(op: Any) -> Any:
    """Returns a reduction that may be given by its number."""
    try:
        return ReduceOp(op)
    except ValueError:
        return op  # the call rejects it, with the name of the call in the message


def _allreduce_slices(
    slices: Sequence[Any], op: ReduceOp, process_set: ProcessSet, name: str | None, device: str
) -> list[Any]:
    """Returns slices with the rows of all ranks; TensorFlow adds rows of the same index."""
    parts = [part for one in slices for part in (one.values, one.indices)]
    shapes = dense_shapes(slices)

    def move(*arrays: Array) -> Sequence[Any]:
        return gather_rows(arrays[: len(parts)], arrays[len(parts) :], process_set, name)

    specs = [spec_of(part, open_rows=True) for part in parts]
    devices = [device] * len(parts) + [HOST] * len(shapes)
    made = call_on_arrays(move, [*parts, *shapes], specs, name, process_set, devices)
    pairs = zip(made[::2], made[1::2], strict=True)
    return [whole_slices(s, *pair, op, process_set) for s, pair in zip(slices, pairs, strict=True)]


def check_slices(op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0) -> None:
    """Checks that a reduction and its factors are defined for ``tf.IndexedSlices``.

    Raises:
        NotImplementedError: they are not.
    """
    if op_of("allreduce", op) not in (Average, Sum):
        raise NotImplementedError(
            f"{op.name} needs dense tensors: tf.IndexedSlices can be averaged and summed only. "
            "Pass sparse_as_dense=True, or tf.convert_to_tensor(slices)."
        )
    if prescale != 1.0 or postscale != 1.0:
        raise NotImplementedError(
            "allreduce of tf.IndexedSlices needs factors of 1: it gathers rows. "
            "Scale the values yourself, or pass tf.convert_to_tensor(slices)."
        )


def dense_shapes(slices: Sequence[Any]) -> list[Any]:
    """Returns the shape of each slices' dense tensor, empty if it is unknown."""
    return [
        tf.zeros([0], tf.int64) if s.dense_shape is None else tf.cast(s.dense_shape, tf.int64)
        for s in slices
    ]


def gather_rows(
    parts: Sequence[Array],
    shapes: Sequence[Array],
    process_set: ProcessSet,
    name: str | None,
    labels: Sequence[str] = (),
) -> list[Any]:
    """Returns the rows of all ranks.

    The number of rows may differ between ranks, so shapes do not show a mismatch. The ranks
    compare the dense shapes and the labels instead.

    Args:
        parts: values and indices of each of the slices, one after the other.
        shapes: the result of `dense_shapes`.
        process_set: the ranks that take part.
        name: for the timeline.
        labels: distinguish slices of the same dense shape.
    """
    texts = [f"rows of {tuple(map(int, shape)) or 'any shape'}" for shape in shapes]
    if labels:
        texts = [f"{label}, {rows}" for label, rows in zip(labels, texts, strict=True)]
    return collectives.grouped_allgather(
        parts, process_set=process_set, name=name, labels=[text for text in texts for _ in range(2)]
    )


def whole_slices(
    slices: Any, values: Any, indices: Any, op: ReduceOp, process_set: ProcessSet
) -> Any:
    """Returns the slices with the gathered values and indices."""
    if op is Average:
        # For integers these are floats, as in Horovod, because rows are divided before the sum.
        values = values / tf.cast(process_set.size(), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
