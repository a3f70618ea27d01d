"""Reductions of tf.IndexedSlices, by gathering their rows. Runs in every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from allranks import collectives
from allranks.collectives import Average, ProcessSet, ReduceOp, Sum
from allranks.tensorflow.crossing import Array, cross, like
from allranks.tensorflow.places import ANYWHERE


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

    def move(*arrays: Array) -> Sequence[Any]:
        return collectives.grouped_allgather(arrays, process_set=process_set, name=name)

    parts = [part for s in slices for part in (s.values, s.indices)]
    specs = [like(part, open_rows=True) for part in parts]
    made = cross(move, parts, specs, name, process_set, [device] * len(parts))
    return [rebuilt(s, made[2 * i : 2 * i + 2], op, process_set) for i, s in enumerate(slices)]


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
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"{op.name} needs dense tensors: tf.IndexedSlices can be averaged and summed only. "
            "Pass sparse_as_dense=True, or tf.convert_to_tensor(slices)."
        )
    if prescale != 1.0 or postscale != 1.0:
        raise NotImplementedError(
            "allreduce of tf.IndexedSlices needs factors of 1: it gathers rows. "
            "Scale the values yourself, or pass tf.convert_to_tensor(slices)."
        )
