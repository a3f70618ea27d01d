"""DistributedOptimizer for whatever TensorFlow calls an optimizer. Runs in every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from allranks.collectives import Average, ProcessSet, ReduceOp, global_process_set
from allranks.tensorflow.compression import Compression
from allranks.tensorflow.gradients import Reduction, check_groups
from allranks.tensorflow.tape import layers_of
from allranks.tensorflow.v1 import DistributedV1Optimizer


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that reduces gradients over the ranks before it applies them.

    Args:
        optimizer: of Keras 3, which becomes distributed itself and is returned, or of
            ``tf.compat.v1.train``, which is wrapped.
        use_locking: for an optimizer of ``tf.compat.v1.train``.
        op: Average or Sum; Adasum for an optimizer of ``tf.compat.v1.train``.
        name: for the timeline. The others are as in
            `allranks.tensorflow.keras_optimizer.DistributedOptimizer`.

    Raises:
        ValueError: an op, or a combination, that it does not have.
        UsageError: it is no optimizer.
    """
    options: dict[str, Any] = {
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "process_set": process_set,
    }
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        check_groups(num_groups, groups)
        reduction = Reduction(
            predivide=gradient_predivide_factor,
            scale_local=scale_local_gradients,
            name=name or f"Distributed{type(optimizer).__name__}",
            **options,
        )
        return DistributedV1Optimizer(
            optimizer,
            reduction,
            name,
            use_locking,
            backward_passes_per_step,
            not average_aggregated_gradients,
        )
    # Keras takes seconds to import, and scripts of TensorFlow 1 do without it.
    from allranks.tensorflow import keras_optimizer

    return keras_optimizer.DistributedOptimizer(
        optimizer,
        name,
        gradient_predivide_factor=gradient_predivide_factor,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        scale_local_gradients=scale_local_gradients,
        **options,
    )


def PartialDistributedOptimizer(
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """A `DistributedOptimizer` that leaves the gradients of some layers to each rank.

    Args:
        optimizer: as in `DistributedOptimizer`.
        local_layers: a Keras layer or several, built.
        **options: as in `DistributedOptimizer`.
    """
    made = DistributedOptimizer(optimizer, *args, **options)
    reduction = reduction_of(made)
    for layer in layers_of(local_layers):
        reduction.register_local(layer.trainable_weights)
    return made


def reduction_of(optimizer: Any) -> Reduction:
    """How a distributed optimizer makes gradients the same."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    found = getattr(inner, "_allranks", None) or getattr(inner, "_reduction", None)
    assert isinstance(found, Reduction)
    return found
