"""Tensors from rank to rank as they are: allgather, broadcast, alltoall. Runs in every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.collectives import Average, ProcessSet, global_process_set
from allranks.tensorflow.crossing import Array, cross, like
from allranks.tensorflow.differentiable import differentiable
from allranks.tensorflow.places import ANYWHERE, HOST


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
        # A gradient may come in another dtype than its source's.
        specs = [tf.TensorSpec(s.shape, g.dtype) for s, g in zip(sources, gradients, strict=True)]
        return cross(own, [*gradients, *rows], specs, name, process_set)

    specs = [like(source, open_rows=True) for source in sources]
    return differentiable(move, back, sources, specs, name, process_set) if sources else []


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
        return cross(collect, [gradient], [like(gradient)], name, process_set)

    return differentiable(move, back, [source], [like(source)], name, process_set)[0]


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
        rows = array.shape[0] if array.ndim else 0
        if not given and (array.ndim == 0 or rows % size):
            return list(collectives.alltoall(array, **options))  # raises: rows cannot be divided
        # Said in any case, so that this rank hears of the others' rows, which may be more or fewer.
        splits = given[0] if given else np.full(size, rows // size)
        pieces, received = collectives.alltoall(array, splits, **options)
        return [pieces, np.asarray(received, np.int32)]

    specs = [like(source, open_rows=True), tf.TensorSpec([size], tf.int32)]
    cuts = [] if splits is None else [tf.convert_to_tensor(splits, tf.int32)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(tensor: Any) -> Any:
        devices = [ANYWHERE, *(HOST for _ in cuts)]
        pieces, received = cross(move, [tensor, *cuts], specs, name, process_set, devices)

        def back(gradient: Any, _received: Any = None) -> Any:
            returned = _exchange(gradient, received, name, process_set)[0]
            return tf.ensure_shape(returned, source.shape)

        return (pieces, received), back

    return run(source)
