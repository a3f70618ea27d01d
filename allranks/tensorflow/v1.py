"""Optimizers and hooks of tf.compat.v1. Runs in every rank.

A graph of TensorFlow 1 orders nothing, so an optimizer makes one call to the ranks for all of its
gradients.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from allranks.errors import UsageError
from allranks.tensorflow.gradients import Reduction
from allranks.tensorflow.variables import FOR_VERSION_1, broadcast_global_variables


class DistributedV1Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of tf.compat.v1 whose gradients are the same on every rank.

    Args:
        optimizer: a ``tf.compat.v1.train.Optimizer``.
        reduction: how gradients become the same.
        name: of the operations; the optimizer's own with Distributed in front where it is None.
        use_locking: as in ``tf.compat.v1.train.Optimizer``.
        passes: gradients of so many steps are accumulated on each rank, then reduced and applied.
        summed: whether accumulated gradients count as their sum, not as their average.
    """

    def __init__(
        self,
        optimizer: Any,
        reduction: Reduction,
        name: str | None,
        use_locking: bool,
        passes: int = 1,
        summed: bool = True,
    ) -> None:
        super().__init__(
            name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking
        )
        self._optimizer = optimizer
        self._reduction = reduction
        self._passes, self._summed = passes, summed
        self._due: Any = None

    def register_local_var(self, var: Any) -> None:
        """Lets the gradient of a variable stay as this rank computes it."""
        self._reduction.register_local([var])

    def compute_gradients(self, *args: Any, **options: Any) -> Any:
        """The wrapped optimizer's gradients, reduced over the ranks.

        Takes what the wrapped optimizer's takes: a loss, most often.

        Raises:
            RuntimeError: TensorFlow executes eagerly, and the loss is no function.

        Collective over the process set.
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
        if self._passes > 1:
            return list(zip(self._accumulated(gradients, variables), variables, strict=True))
        return list(zip(self._reduction.reduce(gradients, variables), variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: Any = None
    ) -> Any:
        """The wrapped optimizer's; with accumulation in the steps in which something is due.

        The global step counts all steps.
        """
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
        """The wrapped optimizer's slot."""
        return self._optimizer.get_slot(*args, **options)

    def get_slot_names(self, *args: Any, **options: Any) -> Any:
        """The wrapped optimizer's names of slots."""
        return self._optimizer.get_slot_names(*args, **options)

    def variables(self, *args: Any, **options: Any) -> Any:
        """The wrapped optimizer's variables."""
        return self._optimizer.variables(*args, **options)

    def _accumulated(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """The reduced sums of the last passes where they are due; else these, which wait."""
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
            made = [g for g in self._reduction.reduce(added, variables) if g is not None]
            if not self._summed:
                made = [g / tf.cast(self._passes, g.dtype) for g in made]
            made = [tf.identity(g) for g in made]
            with tf.control_dependencies(made):
                cleared = [k.assign(tf.zeros_like(k)) for k in kept if k is not None]
            with tf.control_dependencies(cleared):
                return [tf.identity(g) for g in made]

        def waiting() -> list[Any]:
            return [tf.convert_to_tensor(g) for g in gradients if g is not None]

        made = iter(tf.nest.flatten(tf.cond(self._due, reduced, waiting)))
        return [None if a is None else next(made) for a in added]


def _zeros(variable: Any) -> Any:
    return tf.compat.v1.get_variable(
        f"{variable.op.name}/allranks_accumulated",
        initializer=tf.zeros(variable.shape, variable.dtype.base_dtype),
        trainable=False,
        use_resource=True,
    )


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives every global variable the root's value when a session has been created.

    Args:
        root_rank: a rank of the world, the same on every rank.
        device: accepted.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self._done: Any = None
        self._graph: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph, once a graph."""
        graph = tf.compat.v1.get_default_graph()
        if self._done is None or self._graph is not graph:
            self._graph = graph
            self._done = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcasts. Collective over all ranks."""
        session.run(self._done)
