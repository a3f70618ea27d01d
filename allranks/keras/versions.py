"""Keras 3, or Keras 2 if ``TF_USE_LEGACY_KERAS`` is set, and their differences. In every rank.

TensorFlow reads the same variable to choose ``tf.keras``: Keras 3, or the package tf_keras.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any

from allranks.errors import MissingDependency

# Whether `tf.keras` is Keras 2.
LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")


def _import_keras() -> Any:
    try:
        return importlib.import_module("tf_keras" if LEGACY else "keras")
    except ImportError as error:
        wanted = '"allranks[legacy-keras]"' if LEGACY else '"allranks[tensorflow]"'
        if error.name in ("jax", "torch"):  # the backend that KERAS_BACKEND names
            wanted = error.name
        raise MissingDependency(
            f"Keras {2 if LEGACY else 3} cannot be imported on this rank: {error}. "
            f"Install it: pip install {wanted}"
        ) from error


keras: Any = _import_keras()


def is_legacy(optimizer: Any) -> bool:
    # By the class, because a script can use tf_keras although `tf.keras` is Keras 3.
    return any(kind.__module__.startswith("tf_keras.") for kind in type(optimizer).__mro__)


def inner(optimizer: Any) -> Any:
    # A loss-scaling optimizer contains another one.
    return getattr(optimizer, "inner_optimizer", optimizer)


def build(optimizer: Any, variables: Iterable[Any]) -> None:
    if not is_legacy(optimizer):
        if not optimizer.built:
            optimizer.build(variables)
    elif hasattr(inner(optimizer), "_create_all_weights"):
        inner(optimizer)._create_all_weights(list(variables))
    else:
        inner(optimizer).build(list(variables))


def state_of(optimizer: Any) -> list[Any]:
    # In older optimizers of Keras 2 `variables` is a method.
    found = optimizer.variables
    return list(found() if callable(found) else found)


def stored_rate(optimizer: Any) -> Any:
    """Returns the stored learning rate: a variable, a number or a schedule."""
    settings = getattr(optimizer, "_hyper", None)
    return optimizer._learning_rate if settings is None else settings["learning_rate"]


def rate_of(optimizer: Any) -> float:
    rate = stored_rate(optimizer)
    return float(rate.numpy() if hasattr(rate, "numpy") else rate)
