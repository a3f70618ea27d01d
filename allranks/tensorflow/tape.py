"""A tf.GradientTape whose gradients are the same on every rank. Runs in every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from allranks.collectives import Average, ProcessSet, ReduceOp, global_process_set
from allranks.errors import UsageError
from allranks.tensorflow.compression import Compression
from allranks.tensorflow.gradients import Reduction, check_groups, identity


class _Distributed(tf.GradientTape):  # type: ignore[misc]
    """What `DistributedGradientTape` returns: takes a recorded tape over."""

    def __init__(self, tape: Any, reduction: Reduction) -> None:
        self.__dict__.update(tape.__dict__)
        self.reduction = reduction

    def register_local_source(self, source: Any) -> None:
        """Lets the gradient of a variable stay as this rank computes it."""
        self.reduction.register_local([source])

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """The gradients of the target, reduced over the ranks; None stays None.

        Args:
            target: as in ``tf.GradientTape.gradient``, with all that follows.
            sources: variables or tensors, in any nesting, the same on every rank.

        Collective over the process set.
        """
        options.pop("use_generic_names", None)  # Horovod's: names match no calls here
        own = super().gradient(target, sources, output_gradients, *args, **options)
        whole = self.reduction.reduce(tf.nest.flatten(own), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(own, whole)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **options: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """What `gradient` returns, as pairs of a source and its gradient.

        Returns:
            The pairs of the sources that are local, and those of the others.

        Collective over the process set.
        """
        whole = self.gradient(target, sources, output_gradients, *args, **options)
        local: list[tuple[Any, Any]] = []
        shared: list[tuple[Any, Any]] = []
        for source, gradient in zip(tf.nest.flatten(sources), tf.nest.flatten(whole), strict=True):
            kind = local if identity(source) in self.reduction.local else shared
            kind.append((source, gradient))
        return local, shared


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape whose ``gradient()`` reduces over the ranks, made of one that has recorded.

    Args:
        gradtape: a ``tf.GradientTape``.
        device_dense: as in `allreduce`.
        device_sparse: as in `allreduce`.
        compression: as in `allreduce`.
        sparse_as_dense: whether ``tf.IndexedSlices`` are reduced as dense tensors.
        op: Average, Sum, Adasum, Min, Max or Product.
        gradient_predivide_factor: with Average, divides before the sum and multiplies after it.
        num_groups: accepted: all gradients move together.
        groups: accepted, as num_groups.
        process_set: whose ranks take part.
        scale_local_gradients: whether gradients of local sources are divided by the number of
            ranks.

    Raises:
        ValueError: a predivide factor with another op than Average.
        UsageError: it is no tape.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise UsageError(
            f"DistributedGradientTape needs a tf.GradientTape: found {type(gradtape).__name__}. "
            "Wrap the tape of the block: with tf.GradientTape() as tape"
        )
    check_groups(num_groups, groups)
    reduction = Reduction(
        op=op,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        scale_local=scale_local_gradients,
        name="DistributedGradientTape",
    )
    return _Distributed(gradtape, reduction)


def PartialDistributedGradientTape(
    gradtape: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """A `DistributedGradientTape` that leaves the gradients of some layers to each rank.

    Args:
        gradtape: a ``tf.GradientTape``.
        local_layers: a Keras layer or several.
        **options: as in `DistributedGradientTape`.
    """
    tape = DistributedGradientTape(gradtape, *args, **options)
    for layer in layers_of(local_layers):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def layers_of(layers: Any) -> Iterable[Any]:
    """One layer, several or none as a list."""
    if layers is None:
        return []
    found = list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
    for layer in found:
        if not hasattr(layer, "trainable_weights"):
            raise UsageError(
                f"local_layers needs layers of Keras: found {type(layer).__name__}. "
                "Pass for instance [model.layers[0]]."
            )
    return found
