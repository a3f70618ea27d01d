"""A Keras 2 optimizer that applies the same gradients on every rank. Runs in every rank.

As in `keras3_optimizer`, the optimizer itself becomes distributed. Keras 2 has two kinds of
optimizers, and each kind has one method that combines gradients before they are clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from allranks.tensorflow.gradients import GradientReduction
from allranks.tensorflow.keras_version import build, inner
from allranks.tensorflow.private_api import require

Pairs = list[tuple[Any, Any]]


class Keras2Distributed:
    """Methods that are added to an optimizer's class."""

    _allranks: GradientReduction
    _allranks_sums: GradientSums | None

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradient of a variable from the reduction."""
        self._allranks.register_local([var])

    def aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        """Returns the reduced gradients. Optimizers since Keras 2.11 call this."""
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        variables = [variable for _, variable in pairs]
        reduced = self._allranks.reduce([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    def _aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        """Returns the reduced gradients. ``keras.optimizers.legacy`` calls this."""
        return self.aggregate_gradients(grads_and_vars)

    def apply_gradients(self, grads_and_vars: Any, name: Any = None, **options: Any) -> Any:
        """Updates the variables with the reduced gradients, after the last step of a series."""
        apply: Any = super().apply_gradients  # type: ignore[misc]
        if self._allranks_sums is None:
            return apply(grads_and_vars, name=name, **options)
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        variables = [variable for _, variable in pairs]
        with tf.init_scope():
            build(self, variables)
        sums: GradientSums = self._allranks_sums
        sums.add([gradient for gradient, _ in pairs], variables)

        def due() -> Any:
            apply(zip(sums.take(), variables, strict=True), name=name, **options)
            return tf.constant(True)

        def wait() -> Any:
            self.iterations.assign_add(1)  # type: ignore[attr-defined]
            return tf.constant(False)

        # All ranks count the same steps, so all take the branch with the collective.
        tf.cond(sums.are_due(), due, wait)
        return self.iterations  # type: ignore[attr-defined]


class GradientSums:
    """The sums of this rank's gradients over several steps.

    Args:
        passes: the number of steps.
        summed: whether to use the sum of the gradients, not their average.
    """

    def __init__(self, passes: int, summed: bool) -> None:
        self._passes, self._factor = passes, 1.0 if summed else 1.0 / passes
        self._sums: list[Any] = []
        self._count: Any = None

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Adds the gradients of one step."""
        with tf.init_scope():
            if not self._sums:
                self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
                self._sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
        for total, gradient in zip(self._sums, gradients, strict=True):
            total.assign_add(tf.convert_to_tensor(gradient))
        self._count.assign_add(1)

    def are_due(self) -> Any:
        """Returns whether the gradients of the last step have been added."""
        return tf.equal(self._count % self._passes, 0)

    def take(self) -> list[Any]:
        """Returns the accumulated gradients, and sets the sums to zero."""
        made = [total * tf.cast(self._factor, total.dtype) for total in self._sums]
        with tf.control_dependencies(made):
            for total in self._sums:
                total.assign(tf.zeros_like(total))
        return made


def distribute(optimizer: Any, reduction: GradientReduction, passes: int, summed: bool) -> Any:
    """Makes a Keras 2 optimizer distributed, and returns it, as in `keras3_optimizer`."""
    one = inner(optimizer)
    if not isinstance(one, Keras2Distributed):
        older = hasattr(one, "_create_all_weights")
        require(type(one), "_aggregate_gradients" if older else "aggregate_gradients")
        one.__class__ = _subclass(type(one))
    object.__setattr__(one, "_allranks", reduction)
    sums = GradientSums(passes, summed) if passes > 1 else None
    object.__setattr__(one, "_allranks_sums", sums)
    return optimizer


_subclasses: dict[type, type] = {}


def _subclass(kind: type) -> type:
    if kind not in _subclasses:
        # A saved model contains the name and the module of its optimizer's class.
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _subclasses[kind] = type(kind.__name__, (Keras2Distributed, kind), names)
    return _subclasses[kind]
