"""Keras: the third one, or the second where TF_USE_LEGACY_KERAS says so. Runs in every rank.

TensorFlow asks the same variable what ``tf.keras`` is: Keras 3, or the package tf_keras.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any

from allranks.errors import MissingDependency

LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")
"""Whether ``tf.keras`` is Keras 2."""


def _chosen() -> Any:
    try:
        return importlib.import_module("tf_keras" if LEGACY else "keras")
    except ImportError as error:
        extra = "legacy-keras" if LEGACY else "tensorflow"
        raise MissingDependency(
            f"Keras {2 if LEGACY else 3} cannot be imported on this rank: {error}. "
            f'Install it: pip install "allranks[{extra}]"'
        ) from error


keras: Any = _chosen()


def is_legacy(optimizer: Any) -> bool:
    """Whether an optimizer is of Keras 2, whichever Keras ``tf.keras`` is."""
    return any(kind.__module__.startswith("tf_keras.") for kind in type(optimizer).__mro__)


def inner(optimizer: Any) -> Any:
    """The optimizer inside one that scales the loss."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def build(optimizer: Any, variables: Iterable[Any]) -> None:
    """Creates an optimizer's state for these variables, unless it is there."""
    if not is_legacy(optimizer):
        if not optimizer.built:
            optimizer.build(variables)
    elif hasattr(inner(optimizer), "_create_all_weights"):
        inner(optimizer)._create_all_weights(list(variables))
    else:
        inner(optimizer).build(list(variables))


def state_of(optimizer: Any) -> list[Any]:
    """An optimizer's variables: in Keras 2 those of the older ones are called for."""
    found = optimizer.variables
    return list(found() if callable(found) else found)


def rate_of(optimizer: Any) -> Any:
    """What an optimizer keeps as its learning rate: a variable, a number, a schedule."""
    settings = getattr(optimizer, "_hyper", None)
    return optimizer._learning_rate if settings is None else settings["learning_rate"]
