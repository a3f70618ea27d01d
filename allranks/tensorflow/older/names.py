"""``tf.ConfigProto``, ``tf.Session``, ``K.set_session`` and other names of TensorFlow 1.

A script for Keras on TensorFlow 1 names them to choose its GPU. They work, as those of
``tf.compat.v1``, and eager execution stays on: Keras 3 needs it. A script that builds graphs needs
``ALLRANKS_TENSORFLOW=1`` (see ``allranks.horovod.tensorflow1``).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import tensorflow as tf

_ROOTS = ("", "tensorflow.", "keras._tf_keras.", "tf_", "tf_keras.api._v2.")
_BACKEND = ("get_value", "constant", "name_scope", "learning_phase")


def mend() -> None:
    """What TensorFlow 2 lacks is looked up in ``tf.compat.v1``."""
    _fall_back(tf, tf.compat.v1)
    _fall_back(tf.train, tf.compat.v1.train)
    # So that it is there: it is another module than ``tf.keras.backend`` was until then.
    importlib.import_module("tensorflow.keras.backend")
    for backend in copies("keras.backend"):
        for name in _BACKEND:
            if not hasattr(backend, name) and hasattr(tf.keras.backend, name):
                setattr(backend, name, getattr(tf.keras.backend, name))
        backend.set_session = _set_session
        backend.set_value = _set_value


def copies(name: str) -> list[Any]:
    """A module of Keras' under all names by which scripts have imported it so far.

    ``from tensorflow.keras import backend``, ``import tensorflow.keras.backend`` and ``import
    keras.backend`` are three modules.
    """
    return [
        module
        for known, module in list(sys.modules.items())
        if known.endswith(name) and known.removesuffix(name) in _ROOTS
    ]


def _fall_back(module: ModuleType, older: ModuleType) -> None:
    if "__getattr__" in vars(module):
        return

    def find(name: str) -> Any:
        if not name.startswith("_") and hasattr(older, name):
            return getattr(older, name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = find


def _set_value(variable: Any, value: Any) -> None:
    """Gives a variable of TensorFlow or Keras a value."""
    variable.assign(value)


def _set_session(session: Any) -> None:
    """Does nothing: a Keras 3 model runs in no session, and its rank has its GPU already."""
