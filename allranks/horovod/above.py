"""Names that Keras 3 has given up, for scripts that import them above ``import horovod``.

What is only used below that line is mended there (``allranks.tensorflow.older``); an import above
it would have failed by then. TensorFlow's own copy of Keras still has these names:
``ImageDataGenerator``, ``pad_sequences``, ``K.mean`` and others. Standard library only.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from allranks.imported import AfterImport

_STILL = "keras._tf_keras."
MODULES = (
    "keras.backend",
    "keras.layers",
    "keras.losses",
    "keras.metrics",
    "keras.preprocessing",
    "keras.preprocessing.image",
    "keras.preprocessing.sequence",
)
"""Those that have fewer names than ``tf.keras`` has."""


def _add(module: ModuleType) -> None:
    if "__getattr__" in vars(module):
        return

    def find(name: str) -> Any:
        if not name.startswith("_"):
            try:
                return getattr(importlib.import_module(_STILL + module.__name__), name)
            except (ImportError, AttributeError):
                pass
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = find


_above = AfterImport(MODULES, _add)
install = _above.install
"""From now on such names are found, in modules that have been imported as well."""
uninstall = _above.uninstall
"""Modules that are imported from now on are left as they are."""
