"""allgather, broadcast, alltoall and join on tensors. Runs in every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.collectives import Average, ProcessSet, global_process_set
from allranks.tensorflow.tf_bridge import (
    ANYWHERE,
    HOST,
    Array,
    call_on_arrays,
    differentiable,
    spec_of,
)


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
        name: for the timeline.
        ignore_name_scope: ignored.
        process_set: the ranks that take part.

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
    sources = [tf.convert_to_tensor(tensor) for tensor in tensors]
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
        name: for the timeline.
        ignore_name_scope: ignored.
        process_set: the ranks that take part.

    Returns:
        A tensor of the input's shape and dtype. Its gradient is the average of the ranks' gradients
        on the root, and zero elsewhere.

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
        name: for the timeline.
        ignore_name_scope: ignored.
        process_set: the ranks that take part.

    Returns:
        The pieces in the order of their source ranks, (received rows, ...). With ``splits``, a pair
        of the pieces and the number of rows from each rank, (size,) int32. The gradient sends the
        gradient of every piece back to its source.

    Collective over the process set.
    """
    source = tf.convert_to_tensor(tensor)
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
