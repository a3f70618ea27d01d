"""Reduces all gradients of a training step in one call, and the tapes. Runs in every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import tensorflow as tf

from allranks.collectives import Average, ProcessSet, ReduceOp, global_process_set
from allranks.collectives.ops.reducing import op_of
from allranks.collectives.world import process_sets
from allranks.errors import UsageError
from allranks.keras import missing_gradients
from allranks.tensorflow import compression as compressions
from allranks.tensorflow.compression import TensorCompression
from allranks.tensorflow.ops import check_slices, reduce_in_one_call
from allranks.tensorflow.tf_bridge import ANYWHERE


@dataclass
class GradientReduction:
    """The settings of a distributed tape or optimizer, and the reduction of its gradients.

    The arguments are those of `DistributedGradientTape`.
    """

    op: ReduceOp = Average
    compression: Any = TensorCompression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    name: str | None = None
    device_dense: str = ANYWHERE
    device_sparse: str = ANYWHERE
    # Checked and not kept, because all gradients of a step move together.
    num_groups: InitVar[int] = 0
    groups: InitVar[Any] = None
    # Variables whose gradients are not reduced, by `identity`. The dictionary keeps them alive, so
    # that no other variable gets the same identity.
    local: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self, num_groups: int, groups: Any) -> None:
        self.op = op_of("allreduce", self.op)
        compressions.check(self.compression)
        process_sets.check(self.process_set, self.name or "allreduce")
        if num_groups < 0 or (isinstance(groups, int) and groups < 0):
            raise UsageError(
                f"groups needs a number that is not negative: found {groups or num_groups}. "
                "Leave it out: all gradients of a step move together."
            )
        if groups is not None and not isinstance(groups, (int, list, tuple)):
            raise UsageError(
                "groups needs a number, or a list of lists of variables: "
                f"found {type(groups).__name__}. Leave it out: all gradients move together."
            )
        if self.gradient_predivide_factor != 1.0 and self.op is not Average:
            raise ValueError(
                "gradient_predivide_factor needs op=Average: "
                f"found op={self.op.name}. Leave one of them out."
            )

    def register_local(self, variables: Iterable[Any]) -> None:
        for variable in variables:
            self.local[identity(variable)] = variable
            with suppress(TypeError):  # of which there are no weak references
                LOCAL[identity(variable)] = _inner(variable)

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        places: Sequence[int] | None = None,
    ) -> list[Any]:
        """Returns the reduced gradients in the same order. Collective over the process set.

        ``places``: those of the variables among all of an optimizer, if some have been left out.

        Gradients are dense tensors, ``tf.IndexedSlices`` or None. A rank outside the process set
        gets its own gradients back, as in Horovod.
        """
        outs = list(gradients)
        if not process_sets.takes_part(self.process_set, self.name or "allreduce"):
            return outs
        shared = []
        size = self.process_set.size()
        for index, gradient in enumerate(outs):
            if gradient is None:
                continue
            if self.local and identity(variables[index]) in self.local:
                if self.scale_local_gradients:
                    outs[index] = _divided(gradient, size)
                continue
            if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
                outs[index] = tf.convert_to_tensor(gradient)
            shared.append(index)
        if not shared or size == 1:
            return outs
        labels = missing_gradients.labels(shared, len(outs), places)
        chosen = [outs[index] for index in shared]
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in chosen):
            check_slices(self.op)
        reduced = reduce_in_one_call(
            chosen,
            self.op,
            self.process_set,
            self.name,
            compression=self.compression,
            device_dense=self.device_dense,
            device_sparse=self.device_sparse,
            labels=labels,
            prescale_factor=1.0 / self.gradient_predivide_factor,
            postscale_factor=self.gradient_predivide_factor,
        )
        for index, gradient in zip(shared, reduced, strict=True):
            outs[index] = gradient
        return outs


#: All variables that are local to their rank, by `identity`: they differ on purpose.
LOCAL: WeakValueDictionary[int, Any] = WeakValueDictionary()


def identity(variable: Any) -> int:
    return id(_inner(variable))


def _inner(variable: Any) -> Any:
    # A Keras variable and the TensorFlow variable inside it have the same identity.
    inner = getattr(variable, "value", None)
    return variable if inner is None or callable(inner) else inner


def _divided(gradient: Any, size: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


class _DistributedTape(tf.GradientTape):  # type: ignore[misc]
    """A tape that takes over the records of another one."""

    def __init__(self, tape: Any, reduction: GradientReduction) -> None:
        self.__dict__.update(tape.__dict__)
        self.reduction = reduction

    def register_local_source(self, source: Any) -> None:
        """Excludes the gradient of a variable from the reduction."""
        self.reduction.register_local([source])

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Returns the gradients of the target, reduced over the ranks; None stays None.

        Args:
            target: this and the other arguments are as in ``tf.GradientTape.gradient``.
            sources: variables or tensors, nested in any way, the same on every rank.

        Collective over the process set.
        """
        # An option of Horovod, which matches calls by name.
        options.pop("use_generic_names", None)
        own = super().gradient(target, sources, output_gradients, *args, **options)
        whole = self.reduction.reduce(tf.nest.flatten(own), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(own, whole)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **options: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Returns the result of `gradient` as pairs of a source and its gradient.

        Returns:
            The pairs of local sources, and the pairs of all other sources.

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
    compression: Any = TensorCompression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a tape with the records of another one, whose ``gradient()`` reduces over the ranks.

    Args:
        gradtape: a ``tf.GradientTape``.
        device_dense, device_sparse, compression: as in `allreduce`.
        sparse_as_dense: whether ``tf.IndexedSlices`` are reduced as dense tensors.
        op: Average, Sum, Adasum, Min, Max or Product.
        gradient_predivide_factor: with Average, divides before the sum and multiplies after it.
        num_groups, groups: ignored, because all gradients move together.
        process_set: the ranks that take part.
        scale_local_gradients: whether gradients of local sources are divided by the number of
            ranks.

    Raises:
        ValueError: a predivide factor with another op than Average.
        UsageError: ``gradtape`` is not a tape.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise UsageError(
            f"DistributedGradientTape needs a tf.GradientTape: found {type(gradtape).__name__}. "
            "Wrap the tape of the block: with tf.GradientTape() as tape"
        )
    reduction = GradientReduction(
        op=op,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        name="DistributedGradientTape",
    )
    return _DistributedTape(gradtape, reduction)


def PartialDistributedGradientTape(
    gradtape: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Returns a `DistributedGradientTape` that does not reduce the gradients of some layers.

    Args:
        gradtape: a ``tf.GradientTape``.
        local_layers: a Keras layer or several.
        **options: as in `DistributedGradientTape`.
    """
    tape = DistributedGradientTape(gradtape, *args, **options)
    tape.reduction.register_local(weights_of(local_layers))
    return tape


def weights_of(layers: Any) -> list[Any]:
    if layers is None:
        return []
    found = list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
    for layer in found:
        if not hasattr(layer, "trainable_weights"):
            raise UsageError(
                f"local_layers needs layers of Keras: found {type(layer).__name__}. "
                "Pass for instance [model.layers[0]]."
            )
    return [variable for layer in found for variable in layer.trainable_weights]
