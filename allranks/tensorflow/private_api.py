"""Checked access to private names of TensorFlow and Keras. Runs in every rank.

A new version may rename a private name. If Keras renames a method that is overridden here, it no
longer calls the override, and each rank trains alone without an error. So every use first checks
that the name exists.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from allranks.errors import MissingDependency


def require(owner: Any, *names: str) -> None:
    """Checks that a module or class of TensorFlow or Keras has these names.

    Raises:
        MissingDependency: a name is missing.
    """
    for name in names:
        if not hasattr(owner, name):
            home = f"{owner.__module__}." if isinstance(owner, type) else ""
            raise _missing(f"{home}{owner.__name__}.{name}")


def import_private(module: str, *names: str) -> Any:
    """Returns a module of TensorFlow or Keras that has these names.

    Raises:
        MissingDependency: the module or a name is missing.
    """
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
