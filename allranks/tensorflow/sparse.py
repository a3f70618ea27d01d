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

    Raises:
        NotImplementedError: another reduction.

    Collective over the process set.
    """
    check(op)

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
        # Of integers cut towards zero, as the average of dense ones is.
        values = tf.cast(values / tf.cast(process_set.size(), values.dtype), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def check(op: ReduceOp) -> None:
    """Says whether a reduction is defined on slices.

    Raises:
        NotImplementedError: it is not.
    """
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"{op.name} needs dense tensors: tf.IndexedSlices can be averaged and summed only. "
            "Pass sparse_as_dense=True, or tf.convert_to_tensor(slices)."
        )
