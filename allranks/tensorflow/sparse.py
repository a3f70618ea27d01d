"""Reductions of tf.IndexedSlices, by gathering their rows. Runs in every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from allranks import collectives
from allranks.collectives import Average, ProcessSet, ReduceOp, Sum
from allranks.collectives.ops.reducing import op_of
from allranks.tensorflow.crossing import Array, cross, like
from allranks.tensorflow.places import ANYWHERE, HOST


def allreduce(
    slices: Sequence[Any],
    op: ReduceOp,
    process_set: ProcessSet,
    name: str | None = None,
    device: str = ANYWHERE,
) -> list[Any]:
    """Slices with the rows of all ranks; rows of the same index count as their sum.

    Args:
        slices: as many on every rank, of any number of rows.
        op: Sum, or Average, which divides the values by the number of ranks.
        process_set: whose ranks take part.
        name: for the timeline.
        device: where the rows meet, as in `cross`.

    Collective over the process set.
    """
    parts = [part for s in slices for part in (s.values, s.indices)]
    shapes = dense_shapes(slices)

    def move(*arrays: Array) -> Sequence[Any]:
        rows, wholes = arrays[: len(parts)], arrays[len(parts) :]
        return gather(rows, wholes, process_set, name)

    specs = [like(part, open_rows=True) for part in parts]
    devices = [device] * len(parts) + [HOST] * len(shapes)
    made = cross(move, [*parts, *shapes], specs, name, process_set, devices)
    return [rebuilt(s, made[2 * i : 2 * i + 2], op, process_set) for i, s in enumerate(slices)]


def dense_shapes(slices: Sequence[Any]) -> list[Any]:
    """A tensor for each: the shape of the whole; the slices may come without."""
    return [
        tf.zeros([0], tf.int64) if s.dense_shape is None else tf.cast(s.dense_shape, tf.int64)
        for s in slices
    ]


def gather(
    parts: Sequence[Array],
    wholes: Sequence[Array],
    process_set: ProcessSet,
    name: str | None,
    labels: Sequence[str] = (),
) -> list[Any]:
    """The rows of all ranks.

    The ranks bring different numbers of rows, so they compare whose rows they are.

    Args:
        parts: values and indices of each of the slices, one after the other.
        wholes: for each of the slices the shape of the whole.
        process_set: whose ranks take part.
        name: for the timeline.
        labels: for each of the slices what tells it from others of its shape.
    """
    said = [f"rows of {tuple(map(int, whole)) or 'any shape'}" for whole in wholes]
    if labels:
        said = [f"{label}, {rows}" for label, rows in zip(labels, said, strict=True)]
    return collectives.grouped_allgather(
        parts, process_set=process_set, name=name, labels=[text for text in said for _ in range(2)]
    )


def rebuilt(slices: Any, made: Sequence[Any], op: ReduceOp, process_set: ProcessSet) -> Any:
    """The slices again, of gathered values and indices."""
    values, indices = made
    if op is Average:
        # Of integers these are floats, as in Horovod: rows are added up after the division.
        values = values / tf.cast(process_set.size(), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def check(op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0) -> None:
    """Says whether a reduction, with its factors, is defined on slices.

    Raises:
        NotImplementedError: it is not.
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
