"""An optimizer of Keras 2 that applies the same gradients on every rank. Runs in every rank.

As in `keras_optimizer` the optimizer itself becomes distributed. There are two kinds of them in
Keras 2, and each has one method in which gradients are to become one: before they are clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from allranks.tensorflow.gradients import Reduction
from allranks.tensorflow.which_keras import build, inner

Pairs = list[tuple[Any, Any]]


class Distributed:
    """What is added to an optimizer's class."""

    _allranks: Reduction
    _allranks_sums: Sums | None

    def register_local_var(self, var: Any) -> None:
        """Lets the gradient of a variable stay as this rank computes it."""
        self._allranks.register_local([var])

    def aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        """The gradients of all ranks; optimizers since Keras 2.11 ask for them so."""
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        variables = [variable for _, variable in pairs]
        reduced = self._allranks.reduce([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    def _aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        """The same; those of ``keras.optimizers.legacy`` ask so."""
        return self.aggregate_gradients(grads_and_vars)

    def apply_gradients(self, grads_and_vars: Any, name: Any = None, **options: Any) -> Any:
        """Updates the variables with the gradients of all ranks, where something is due."""
        apply: Any = super().apply_gradients  # type: ignore[misc]
        if self._allranks_sums is None:
            return apply(grads_and_vars, name=name, **options)
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        variables = [variable for _, variable in pairs]
        with tf.init_scope():
            build(self, variables)
        sums: Sums = self._allranks_sums
        sums.add([gradient for gradient, _ in pairs], variables)

        def due() -> Any:
            apply(zip(sums.taken(), variables, strict=True), name=name, **options)
            return tf.constant(True)

        def wait() -> Any:
            self.iterations.assign_add(1)  # type: ignore[attr-defined]
            return tf.constant(False)

        tf.cond(sums.are_due(), due, wait)
        return self.iterations  # type: ignore[attr-defined]


class Sums:
    """Gradients of several steps on this rank, added up.

    Args:
        passes: so many steps are one.
        summed: whether they count as their sum, not as their average.
    """

    def __init__(self, passes: int, summed: bool) -> None:
        self._passes, self._factor = passes, 1.0 if summed else 1.0 / passes
        self._kept: list[Any] = []
        self._count: Any = None

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """One step more."""
        with tf.init_scope():
            if not self._kept:
                self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
                self._kept = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
        for kept, gradient in zip(self._kept, gradients, strict=True):
            kept.assign_add(tf.convert_to_tensor(gradient))
        self._count.assign_add(1)

    def are_due(self) -> Any:
        """Whether the last of the steps has been added."""
        return tf.equal(self._count % self._passes, 0)

    def taken(self) -> list[Any]:
        """The gradients, which begin at zero again."""
        made = [kept * tf.cast(self._factor, kept.dtype) for kept in self._kept]
        with tf.control_dependencies(made):
            for kept in self._kept:
                kept.assign(tf.zeros_like(kept))
        return made


def distribute(optimizer: Any, reduction: Reduction, passes: int, summed: bool) -> Any:
    """Makes an optimizer of Keras 2 distributed, and returns it: as in `keras_optimizer`."""
    one = inner(optimizer)
    if not isinstance(one, Distributed):
        one.__class__ = _subclass(type(one))
    object.__setattr__(one, "_allranks", reduction)
    object.__setattr__(one, "_allranks_sums", Sums(passes, summed) if passes > 1 else None)
    return optimizer


_subclasses: dict[type, type] = {}


def _subclass(kind: type) -> type:
    """The distributed class of a class of optimizers, saved under the name of that class."""
    if kind not in _subclasses:
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _subclasses[kind] = type(kind.__name__, (Distributed, kind), names)
    return _subclasses[kind]
