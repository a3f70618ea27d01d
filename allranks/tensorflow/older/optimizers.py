"""``SGD(lr=, decay=)``, ``opt.lr``, ``opt.variables()`` and ``apply_gradients`` as they were."""

from __future__ import annotations

import functools
from typing import Any

import keras
from keras.src.backend.common.variables import Variable
from keras.src.optimizers.base_optimizer import BaseOptimizer


class _Variables(list[Any]):
    """The variables of an optimizer: a list, as now, that can be called, as before."""

    def __call__(self) -> _Variables:
        return self


def mend() -> None:
    """Keras' optimizers and variables take and give what they did before Keras 3."""
    _take_lr_and_decay()
    _drop_options_of_apply_gradients()
    variables = BaseOptimizer.variables.fget
    BaseOptimizer.variables = property(lambda self: _Variables(variables(self)))
    BaseOptimizer.lr = property(_rate, _set_rate)
    Variable.ref = _ref


def _take_lr_and_decay() -> None:
    begin, current = BaseOptimizer.__init__, BaseOptimizer._get_current_learning_rate

    @functools.wraps(begin)
    def __init__(self: Any, learning_rate: Any, *args: Any, **options: Any) -> None:
        given = options.pop("lr", None)
        decay = options.pop("decay", None) or 0.0
        begin(self, learning_rate if given is None else given, *args, **options)
        self._older_decay = float(decay)

    @functools.wraps(current)
    def rate(self: Any) -> Any:
        decay = getattr(self, "_older_decay", 0.0)
        if not decay:
            return current(self)
        return current(self) / (1.0 + decay * keras.ops.cast(self.iterations, "float32"))

    BaseOptimizer.__init__ = __init__
    BaseOptimizer._get_current_learning_rate = rate


def _drop_options_of_apply_gradients() -> None:
    apply = BaseOptimizer.apply_gradients

    @functools.wraps(apply)
    def apply_gradients(
        self: Any,
        grads_and_vars: Any,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        return apply(self, grads_and_vars)

    BaseOptimizer.apply_gradients = apply_gradients


def _rate(optimizer: Any) -> Any:
    """The variable, before any decay."""
    return getattr(optimizer, "inner_optimizer", optimizer)._learning_rate


def _set_rate(optimizer: Any, value: Any) -> None:
    optimizer.learning_rate = value


def _ref(variable: Any) -> Any:
    """A key for dictionaries, as that of a tf.Variable."""
    return variable.value.ref()
