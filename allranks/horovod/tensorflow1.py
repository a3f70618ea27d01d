"""``ALLRANKS_TENSORFLOW=1``: ``import tensorflow`` means version 1 in cells and scripts.

TensorFlow 2 contains version 1 as ``tensorflow.compat.v1``, but a script for version 1 has the
line ``import tensorflow as tf``. Packages, TensorFlow's own and Keras among them, still get
version 2. Standard library only.
"""

from __future__ import annotations

import builtins
import importlib
import os
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from allranks.records import settings

# `1` or `2`: the version that `import tensorflow` means outside of packages.
SETTING = "ALLRANKS_TENSORFLOW"

_V1 = "tensorflow.compat.v1"
_import = builtins.__import__


def install() -> bool:
    """Makes ``import tensorflow`` import the version that the environment asks for.

    Returns:
        Whether that is version 1.

    Raises:
        UsageError: ``ALLRANKS_TENSORFLOW`` is neither 1 nor 2.
    """
    wanted = settings.chosen(SETTING, ("1", "2"), "2")
    # Not by sys.modules["tensorflow"], where packages find version 2.
    if wanted == "1":
        builtins.__import__ = _import_version_1
    return wanted == "1"


def _import_version_1(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    if level or name.partition(".")[0] != "tensorflow" or name.startswith(_V1):
        return _import(name, globals, locals, fromlist or (), level)
    # TensorFlow's own files call `__import__(name)` without globals: use those of the caller.
    if _is_package(sys._getframe(1).f_globals if globals is None else globals):
        return _import(name, globals, locals, fromlist or (), level)
    module = _version_1()
    if name == "tensorflow":
        return module
    # ``import tensorflow.x.y`` binds ``tensorflow``; ``from tensorflow.x import z`` wants ``x``.
    inner: Any = module
    for part in name.split(".")[1:]:
        inner = getattr(inner, part, None)
    if inner is None:
        return _import(name, globals, locals, fromlist or (), level)
    return inner if fromlist else module


def _version_1() -> ModuleType:
    first = _V1 not in sys.modules
    module = importlib.import_module(_V1)
    if first or module.executing_eagerly():
        logger = module.get_logger()
        level = logger.level
        # TensorFlow warns here that version 1 is old, and the user has not called this function.
        logger.setLevel("ERROR")
        module.disable_v2_behavior()
        logger.setLevel(level)
    return module


def _is_package(globals: Mapping[str, object]) -> bool:
    """Returns whether the importing code is in an installed package, or has no file."""
    if globals.get("__name__") == "__main__":
        return False
    file = globals.get("__file__")
    return not isinstance(file, str) or file.startswith(_PACKAGES)


_PACKAGES = tuple(
    {
        *site.getsitepackages(),
        site.getusersitepackages(),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platlib"),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    }
)
