"""DistributedOptimizer for optimizers of Keras and of TensorFlow 1. Runs in every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from allranks.collectives import Average, ProcessSet, ReduceOp, global_process_set
from allranks.errors import UsageError
from allranks.tensorflow.basics import FOR_VERSION_1
from allranks.tensorflow.compression import TensorCompression
from allranks.tensorflow.gradients import GradientReduction, weights_of


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = TensorCompression.none,
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
    """Returns an optimizer that reduces gradients over the ranks before it applies them.

    Args:
        optimizer: an optimizer of Keras, which is changed and returned, or of
            ``tf.compat.v1.train``, which is wrapped.
        name: for the timeline.
        use_locking: for an optimizer of ``tf.compat.v1.train``.
        op: Average or Sum; Adasum for an optimizer of ``tf.compat.v1.train``.
        process_set: this and the other arguments are as in
            `allranks.tensorflow.keras.DistributedOptimizer`.

    Raises:
        ValueError: an op or a combination of arguments that is not supported.
        UsageError: ``optimizer`` is not an optimizer.
    """
    settings: dict[str, Any] = {
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        name = name or f"Distributed{type(optimizer).__name__}"
        reduction = GradientReduction(name=name, **settings)
        summed = not average_aggregated_gradients
        return DistributedV1Optimizer(
            optimizer, reduction, name, use_locking, backward_passes_per_step, summed
        )
    # Keras takes seconds to import, and scripts of TensorFlow 1 do not need it.
    from allranks.tensorflow import keras_optimizer

    return keras_optimizer.DistributedOptimizer(
        optimizer,
        name,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        **settings,
    )


def PartialDistributedOptimizer(
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Returns a `DistributedOptimizer` that does not reduce the gradients of some layers.

    Args:
        optimizer: as in `DistributedOptimizer`.
        local_layers: a Keras layer or several, built.
        **options: as in `DistributedOptimizer`.
    """
    made = DistributedOptimizer(optimizer, *args, **options)
    # An optimizer of Keras that scales the loss contains the distributed one.
    reduction: GradientReduction = getattr(made, "inner_optimizer", made)._allranks
    reduction.register_local(weights_of(local_layers))
    return made


class DistributedV1Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of ``tf.compat.v1`` whose gradients are the same on every rank.

    A graph of TensorFlow 1 has no order, so the optimizer reduces all gradients in one call.
    """

    def __init__(
        self,
        optimizer: Any,
        reduction: GradientReduction,
        name: str,
        use_locking: bool,
        passes: int,
        summed: bool,
    ) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self._allranks = reduction
        self._passes, self._summed = passes, summed
        self._due: Any = None  # with accumulation, whether this step applies gradients

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradient of a variable from the reduction."""
        self._allranks.register_local([var])

    def compute_gradients(self, *args: Any, **options: Any) -> Any:
        """Returns the wrapped optimizer's gradients, reduced over the ranks.

        The arguments are those of the wrapped optimizer. Collective over the process set.
        """
        loss = next(iter(args), options.get("loss"))
        if tf.executing_eagerly() and loss is not None and not callable(loss):
            raise RuntimeError(
                f"{self.get_name()} needs a graph of TensorFlow 1, or a function that returns the "
                f"loss: TensorFlow executes eagerly, and the loss is a {type(loss).__name__}. "
                f"Use DistributedGradientTape. {FOR_VERSION_1}"
            )
        if tf.executing_eagerly() and self._passes > 1:
            raise UsageError(
                f"{self.get_name()} accumulates gradients in a graph of TensorFlow 1 only: found "
                f"backward_passes_per_step={self._passes}, and TensorFlow executes eagerly. "
                "Leave it out."
            )
        pairs = self._optimizer.compute_gradients(*args, **options)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        reduce = self._accumulated if self._passes > 1 else self._allranks.reduce
        return list(zip(reduce(gradients, variables), variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: Any = None
    ) -> Any:
        # With accumulation only the last pass applies gradients; the global step counts all.
        pairs = list(grads_and_vars)
        if self._due is None:
            return self._optimizer.apply_gradients(pairs, global_step, name)

        def apply() -> Any:
            done = self._optimizer.apply_gradients(pairs, global_step)
            with tf.control_dependencies([done] if done is not None else []):
                return tf.no_op()

        def count() -> Any:
            if global_step is None:
                return tf.no_op()
            with tf.control_dependencies([tf.compat.v1.assign_add(global_step, 1)]):
                return tf.no_op()

        return tf.cond(self._due, apply, count, name=name)

    def get_slot(self, *args: Any, **options: Any) -> Any:
        return self._optimizer.get_slot(*args, **options)

    def get_slot_names(self, *args: Any, **options: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **options)

    def variables(self, *args: Any, **options: Any) -> Any:
        return self._optimizer.variables(*args, **options)

    def _accumulated(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Returns the reduced sums after the last pass, else this rank's gradients."""
        kept: list[Any] = [
            None if g is None else _zeros(v) for g, v in zip(gradients, variables, strict=True)
        ]
        count = tf.compat.v1.get_variable(
            f"{self.get_name()}_passes", [], tf.int64, tf.compat.v1.zeros_initializer, False
        )
        added = [
            None if g is None else k.assign_add(tf.convert_to_tensor(g), read_value=True)
            for g, k in zip(gradients, kept, strict=True)
        ]
        there = [a for a in added if a is not None]
        counted = count.assign_add(1, read_value=True)
        with tf.control_dependencies([*there, counted]):
            self._due = tf.equal(counted % self._passes, 0)

        def reduced() -> list[Any]:
            made = [g for g in self._allranks.reduce(added, variables) if g is not None]
            if not self._summed:
                made = [g / tf.cast(self._passes, g.dtype) for g in made]
            # The sums are copied before they are cleared.
            made = [tf.identity(g) for g in made]
            with tf.control_dependencies(made):
                cleared = [k.assign(tf.zeros_like(k)) for k in kept if k is not None]
            with tf.control_dependencies(cleared):
                return [tf.identity(g) for g in made]

        def waiting() -> list[Any]:
            return [tf.convert_to_tensor(g) for g in gradients if g is not None]

        # All ranks count the same steps, so all take the branch with the collective.
        made = iter(tf.nest.flatten(tf.cond(self._due, reduced, waiting)))
        return [None if a is None else next(made) for a in added]


def _zeros(variable: Any) -> Any:
    return tf.compat.v1.get_variable(
        f"{variable.op.name}/allranks_accumulated",
        initializer=tf.zeros(variable.shape, variable.dtype.base_dtype),
        trainable=False,
        use_resource=True,
    )
