"""Where Keras decides for one rank what all ranks must decide together. Runs in every rank."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.collectives import Min
from allranks.tensorflow.crossing import Array, cross

_MARK = "_allranks_hooked"


def install(distributed: type) -> None:
    """Makes Keras ask all ranks; models whose optimizer is not distributed notice nothing.

    Mixed precision: a step is skipped on all ranks where one rank's gradients overflow. Each rank
    for itself would skip it, or apply it, while others wait for its gradients.

    XLA: a step that talks to other ranks is not compiled, whatever ``jit_compile`` says, as what
    XLA compiles cannot call out.

    Args:
        distributed: the class that a distributed optimizer's class is derived from.
    """
    _agree_on_overflows(distributed)
    _leave_xla(distributed)


def _agree_on_overflows(distributed: type) -> None:
    scaling = keras.optimizers.LossScaleOptimizer
    check = scaling.check_finite
    if hasattr(check, _MARK):
        return

    @functools.wraps(check)
    def check_finite(self: Any, grads: Any) -> Any:
        mine = check(self, grads)
        inner = self.inner_optimizer
        if not isinstance(inner, distributed):
            return mine
        process_set = inner._allranks.process_set  # type: ignore[attr-defined]
        if process_set.size() == 1:
            return mine

        def agree(flag: Array) -> list[Any]:
            return [
                collectives.allreduce(
                    np.asarray(flag), Min, process_set=process_set, name="check_finite"
                )
            ]

        return cross(agree, [mine], [tf.TensorSpec([], tf.bool)], "check_finite", process_set)[0]

    setattr(check_finite, _MARK, True)
    scaling.check_finite = check_finite


def _leave_xla(distributed: type) -> None:
    trainer = next(kind for kind in keras.Model.__mro__ if "jit_compile" in vars(kind))
    asked: property = vars(trainer)["jit_compile"]
    if hasattr(asked.fget, _MARK):
        return

    def jit_compile(self: Any) -> Any:
        optimizer = getattr(self, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        return False if isinstance(inner, distributed) else asked.fget(self)  # type: ignore[misc]

    setattr(jit_compile, _MARK, True)
    setattr(trainer, "jit_compile", property(jit_compile, asked.fset, doc=asked.__doc__))  # noqa: B010
