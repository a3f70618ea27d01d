"""Checks that private names of TensorFlow and Keras exist before they are used. In every rank.

A new version may rename a private name. If Keras renames a method that is overridden here, it no
longer calls the override, and each rank trains alone without an error.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from allranks.errors import MissingDependency, UsageError

_REPLACED = "_allranks_replaced"


def require(owner: Any, *names: str) -> None:
    """Raises MissingDependency unless a module or class of TensorFlow or Keras has these names."""
    for name in names:
        if not hasattr(owner, name):
            home = f"{owner.__module__}." if isinstance(owner, type) else ""
            raise _missing(f"{home}{owner.__name__}.{name}")


def import_private(module: str, *names: str) -> Any:
    """Returns a module of TensorFlow or Keras that has these names, or raises MissingDependency."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(module) from error
    require(found, *names)
    return found


def _missing(name: str) -> MissingDependency:
    package = name.partition(".")[0].replace("_", "-")
    here = version(package)
    return MissingDependency(
        f"allranks needs {name}, and {package} {here} has none: it may be newer than this "
        f'allranks. Install an older one, pip install "{package}<{here}", or a newer allranks.'
    )


def replace(owner: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
    """Replaces a function by ``wrapped(function)`` once; a second call does nothing."""
    require(owner, name)
    function = getattr(owner, name)
    if not hasattr(function, _REPLACED):
        replacement = functools.wraps(function)(wrapped(function))
        setattr(replacement, _REPLACED, True)
        setattr(owner, name, replacement)


_subclasses: dict[type, type] = {}


def _without_settings(kind: type, *_: Any, **__: Any) -> Any:
    """In place of ``from_config``: an optimizer without the settings would train on its own."""
    raise UsageError(
        f"from_config needs a class of Keras: found that of a distributed {kind.__name__}, whose "
        "config has no settings of the ranks. Type: "
        f"DistributedOptimizer({kind.__name__}.from_config(config))"
    )


def subclass(kind: type, methods: type) -> type:
    """Returns a class of the same name that has the methods too; it is made once."""
    made = _subclasses.get(kind)
    if made is None:
        # Keras 3 also where `tf.keras` is Keras 2, because it has the registry.
        import keras

        # A saved model contains the name and the module of its optimizer's class.
        ours = kind.__module__.startswith("keras.")
        module = "keras.optimizers" if ours else kind.__module__
        names: dict[str, Any] = {
            **{"__module__": module, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__},
            "from_config": classmethod(_without_settings),
        }
        made = _subclasses[kind] = type(kind.__name__, (methods, kind), names)
        package = keras.saving.get_registered_name(kind)
        if package != kind.__name__:
            # A class that the user has registered is saved under its registered name.
            keras.saving.get_custom_objects()  # creates the registry
            registry = import_private("keras.src.saving.object_registration", "GLOBAL_CUSTOM_NAMES")
            registry.GLOBAL_CUSTOM_NAMES[made] = package
    return made
