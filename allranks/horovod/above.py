"""Names that Keras 3 has given up, for scripts that import them above ``import horovod``.

What is only used below that line is mended there (``allranks.tensorflow.older``); an import above
it would have failed by then. TensorFlow's own copy of Keras still has these names:
``ImageDataGenerator``, ``pad_sequences``, ``K.mean`` and others. Standard library only.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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


class Above(importlib.abc.MetaPathFinder):
    """Has these modules look for a name that they lack where it still is."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns what the other finders have found, with a loader that adds the names."""
        if name not in MODULES:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, Above))
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Adding(spec.loader)
        return spec


class _Adding(importlib.abc.Loader):
    """A module's own loader, which adds names when the module has been run."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns what the module's own loader makes."""
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module."""
        self._own.exec_module(module)
        _add(module)


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


def install() -> None:
    """From now on such names are found, in modules that have been imported as well."""
    if not any(isinstance(finder, Above) for finder in sys.meta_path):
        sys.meta_path.insert(0, Above())
    for name in MODULES:
        if name in sys.modules:
            _add(sys.modules[name])


def uninstall() -> None:
    """Modules that are imported from now on are left as they are."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Above)]
