"""Collectives on tensors; reductions also take ``tf.IndexedSlices``. Runs in every rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.collectives import Adasum, Average, ProcessSet, ReduceOp, Sum, global_process_set
from allranks.collectives.arrays.libraries import reduction_of
from allranks.collectives.ops.reducing import op_of
from allranks.errors import UsageError
from allranks.tensorflow import compression as compressions
from allranks.tensorflow.compression import TensorCompression
from allranks.tensorflow.tf_bridge import (
    ANYWHERE,
    HOST,
    Array,
    call_on_arrays,
    differentiable,
    spec_of,
    to_tensor,
)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = TensorCompression.none,
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
        op: Average (default), Sum or Adasum; also Min, Max and Product, which have no gradient.
            The same on every rank.
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
    return grouped_allreduce(
        [tensor],
        device_dense=device_dense,
        device_sparse=device_sparse,
        # Here, because its deprecation warning names the line of this function's caller.
        op=op_or_average(op, average),
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
    compression: Any = TensorCompression.none,
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
    packed, contexts = compressions.compress_all(compression, dense.values())
    factors = prescale_factor, postscale_factor
    reduced = _allreduce_dense(packed, kind, *factors, process_set, name, device_dense)
    whole = compressions.decompress_all(compression, reduced, contexts)
    if slices:
        rows = list(slices.values())
        whole += reduce_in_one_call(rows, kind, process_set, name, device_sparse=device_sparse)
    by_index = dict(zip([*dense, *slices], whole, strict=True))
    return [by_index[index] for index in range(len(tensors))]


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
        kind = op_of("allreduce", op)
        if kind not in (Average, Sum, Adasum):
            raise UsageError(
                f"allreduce has a gradient for Average, Sum and Adasum only: found {kind.name}. "
                "Stop the gradient: tf.stop_gradient(x)."
            )
        return _allreduce_dense(gradients, op, prescale, postscale, process_set, name, device)

    specs = [spec_of(tensor) for tensor in tensors]
    return differentiable(move, back, tensors, specs, name, process_set, device)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = TensorCompression.none,
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
        op: Average or Sum; also Min, Max and Product, which have no gradient.
        process_set: this and the other arguments are as in `allreduce`.

    Returns:
        (rows // size, ...); the first ``rows % size`` ranks get one row more.

    Collective over the process set.
    """
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter(
        [tensor], device_dense, compression, op, process_set, *factors, name
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = TensorCompression.none,
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
    sources, contexts = compressions.compress_all(compression, tensors)
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

    reduced = differentiable(move, back, sources, specs, name, process_set, device_dense)
    return compressions.decompress_all(compression, reduced, contexts)


def op_or_average(op: ReduceOp | None, average: bool | None) -> Any:
    # `average` is deprecated.
    if average is None:
        return Average if op is None else _op(op)
    if op is not None:
        raise ValueError("op= and average= say the same thing: found both. Pass op= alone.")
    warnings.warn("average= is deprecated: pass op=Average or op=Sum.", DeprecationWarning, 3)
    return Average if average else Sum


def _op(op: Any) -> Any:
    # A reduction may be given by its number.
    found = reduction_of(op)
    return op if found is None else found  # the call rejects it, with its name in the message


def check_slices(op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0) -> None:
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


def reduce_in_one_call(
    tensors: Sequence[Any],
    op: ReduceOp,
    process_set: ProcessSet,
    name: str | None,
    *,
    compression: Any = TensorCompression.none,
    device_dense: str = ANYWHERE,
    device_sparse: str = ANYWHERE,
    labels: Sequence[str] = (),
    **factors: float,
) -> list[Any]:
    """Reduces dense tensors and gathers the rows of ``tf.IndexedSlices``; has no gradient.

    The number of rows may differ between ranks, so their shapes do not show a mismatch. The ranks
    compare the dense shapes instead, and the labels, one for each tensor if there are any.
    """
    # One call, because leaving a graph takes longer than a small allreduce, and because two
    # functions in a graph of TensorFlow 1 need an agreement on their order.
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in sparse]
    slices = [tensors[i] for i in sparse]
    packed, contexts = compressions.compress_all(compression, [tensors[i] for i in dense])
    # The rows are gathered, not added: TensorFlow adds rows of the same index.
    parts = [part for one in slices for part in (one.values, one.indices)]
    shapes = [  # unknown ones are empty
        tf.zeros([0], tf.int64) if s.dense_shape is None else tf.cast(s.dense_shape, tf.int64)
        for s in slices
    ]
    end_of_dense, end_of_parts = len(packed), len(packed) + len(parts)
    options: dict[str, Any] = {"process_set": process_set, "name": name}

    def move(*arrays: Array) -> list[Any]:
        made: list[Any] = []
        if dense:
            named = tuple(labels[i] for i in dense if labels)
            arrays_of_dense = arrays[:end_of_dense]
            made += collectives.grouped_allreduce(
                arrays_of_dense, op, labels=named, **options, **factors
            )
        if slices:
            texts = []
            for index, shape in zip(sparse, arrays[end_of_parts:], strict=True):
                rows = f"rows of {tuple(map(int, shape)) or 'any shape'}"
                texts += 2 * [f"{labels[index]}, {rows}" if labels else rows]
            rows_of_all = arrays[end_of_dense:end_of_parts]
            made += collectives.grouped_allgather(rows_of_all, labels=texts, **options)
        return made

    # A graph does not know the number of rows, which is the sum over all ranks.
    specs = [spec_of(tensor) for tensor in packed]
    specs += [spec_of(part, open_rows=True) for part in parts]
    devices = [device_dense] * len(packed) + [device_sparse] * len(parts) + [HOST] * len(shapes)
    made = call_on_arrays(move, [*packed, *parts, *shapes], specs, name, process_set, devices)
    whole = compressions.decompress_all(compression, made[:end_of_dense], contexts)
    gathered = iter(made[end_of_dense:])
    for one, values, indices in zip(slices, gathered, gathered, strict=True):
        if op is Average:
            # For integers these are floats, as in Horovod: rows are divided before the sum.
            values /= tf.cast(process_set.size(), values.dtype)
        whole.append(tf.IndexedSlices(values, indices, one.dense_shape))
    by_index = dict(zip([*dense, *sparse], whole, strict=True))
    return [by_index[index] for index in range(len(tensors))]


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns all ranks' tensors, concatenated along the first dimension.

    Args:
        tensor: (rows, ...): the number of rows may differ between ranks, the other dimensions and
            the dtype may not.
        process_set: this and the other arguments are as in `allreduce`.

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
    """Returns the allgather of each tensor of a list, in one call that waits only once.

    Collective over the process set.
    """
    sources = [to_tensor(tensor) for tensor in tensors]
    options: dict[str, Any] = {"process_set": process_set, "name": name}

    def move(*arrays: Array) -> Sequence[Any]:
        if len(arrays) == 1:
            return [collectives.allgather(arrays[0], **options)]
        return collectives.grouped_allgather(arrays, **options)

    def own_rows(*arrays: Array) -> Sequence[Any]:
        gradients, rows = arrays[: len(sources)], arrays[len(sources) :]
        # In a graph the numbers of rows are not known earlier.
        counts = collectives.allgather(np.array(rows, np.int64).reshape(1, -1), **options)
        ends = np.cumsum(counts, axis=0)[process_set.rank()]
        whole = collectives.grouped_allreduce(gradients, Average, **options)
        return [
            g[end - n : end] for g, end, n in zip(whole, ends.tolist(), map(int, rows), strict=True)
        ]

    def back(*gradients: Any) -> Any:
        rows = [tf.shape(source)[0] for source in sources]
        # The dtype of a gradient may differ from that of its source.
        specs = [tf.TensorSpec(s.shape, g.dtype) for s, g in zip(sources, gradients, strict=True)]
        return call_on_arrays(own_rows, [*gradients, *rows], specs, name, process_set)

    specs = [spec_of(source, open_rows=True) for source in sources]
    return differentiable(move, back, sources, specs, name, process_set) if sources else []


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's tensor on every rank.

    Args:
        tensor: any shape and dtype, the same on every rank.
        root_rank: a rank of the world, also for a process set; the same on every rank.
        process_set: this and the other arguments are as in `allreduce`.

    Returns:
        A tensor of the input's shape and dtype. Its gradient is the average of the ranks' gradients
        on the root, and zero elsewhere.

    Collective over the process set.
    """
    source = to_tensor(tensor)
    root = int(root_rank)
    options: dict[str, Any] = {"process_set": process_set, "name": name}

    def move(array: Array) -> Sequence[Any]:
        return [collectives.broadcast(array, root, **options)]

    def collect(gradient: Array) -> Sequence[Any]:
        mean = collectives.allreduce(gradient, Average, **options)
        return [mean if collectives.rank() == root else np.zeros_like(mean)]

    def back(gradient: Any) -> Any:
        return call_on_arrays(collect, [gradient], [spec_of(gradient)], name, process_set)

    return differentiable(move, back, [source], [spec_of(source)], name, process_set)[0]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends each rank a piece of this rank's tensor, and returns the pieces from all ranks.

    Args:
        tensor: (rows, ...): the number of rows may differ between ranks, the other dimensions and
            the dtype may not.
        splits: the number of rows for each rank, (size,) int32; None for equal pieces.
        process_set: this and the other arguments are as in `allreduce`.

    Returns:
        The pieces in the order of their source ranks, (received rows, ...). With ``splits``, a pair
        of the pieces and the number of rows from each rank, (size,) int32. The gradient sends the
        gradient of every piece back to its source.

    Collective over the process set.
    """
    source = to_tensor(tensor)
    pieces, received = _exchange(source, splits, name, process_set)
    return pieces if splits is None else (pieces, received)


def _exchange(source: Any, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
    options: dict[str, Any] = {"process_set": process_set, "name": name}
    size = process_set.size()

    def move(array: Array, *given: Array) -> Sequence[Any]:
        rows = array.shape[0] if array.ndim else 0
        if not given and (array.ndim == 0 or rows % size):
            # The call raises on all ranks, because the rows cannot be divided.
            return list(collectives.alltoall(array, **options))
        # Equal splits are sent too, because the other ranks may send other numbers of rows.
        splits = given[0] if given else np.full(size, rows // size)
        pieces, received = collectives.alltoall(array, splits, **options)
        return [pieces, np.asarray(received, np.int32)]

    specs = [spec_of(source, open_rows=True), tf.TensorSpec([size], tf.int32)]
    cuts = [] if splits is None else [tf.convert_to_tensor(splits, tf.int32)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(tensor: Any) -> Any:
        devices = [ANYWHERE, *(HOST for _ in cuts)]
        pieces, received = call_on_arrays(move, [tensor, *cuts], specs, name, process_set, devices)

        def back(gradient: Any, _received: Any = None) -> Any:
            returned = _exchange(gradient, received, name, process_set)[0]
            return tf.ensure_shape(returned, source.shape)

        return (pieces, received), back

    return run(source)


def join() -> Any:
    """Joins allreduces of the other ranks with zeros, until all ranks have called this.

    Returns:
        The rank that joined last, an int32 tensor.

    Collective over all ranks.
    """
    outputs = [tf.TensorSpec([], tf.int32)]
    return call_on_arrays(lambda: [np.int32(collectives.join())], [], outputs, "join")[0]
