"""The modules that ``import horovod`` and ``import tensorflow`` find. Standard library only.

**horovod.** An installed Horovod has priority: this finder handles ``horovod`` only if no other
finder finds it. The modules below it are found here first, because another finder would load a
second copy of a module that is already loaded under its name in allranks.

**tensorflow.** With ``ALLRANKS_TENSORFLOW=1``, ``import tensorflow`` means version 1 in cells and
scripts. TensorFlow 2 contains version 1 as ``tensorflow.compat.v1``, but a script for version 1 has
the line ``import tensorflow as tf``. Packages, TensorFlow's own and Keras among them, still get
version 2.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.abc
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from allranks.errors import MissingDependency
from allranks.horovod.runner import OLD_SCRIPTS
from allranks.post_import import PostImportHook, look_up_in
from allranks.records import config

# `on`; `name`: lines for older versions of TensorFlow and Keras do not work; or `off`.
SETTING = "ALLRANKS_HOROVOD"
# `1` or `2`: the version that `import tensorflow` means outside of packages.
TENSORFLOW_SETTING = "ALLRANKS_TENSORFLOW"

_PACKAGE = __name__.rpartition(".")[0]
_COMMON = "allranks.horovod.common"
_RUNNER = "allranks.horovod.runner"
#: Horovod's modules and the modules of allranks that replace them, the longer names first. A module
#: that is not listed has the same place below the replacement of its package.
PLACES = {
    "horovod.tensorflow.functions": "allranks.tensorflow",
    "horovod.tensorflow.mpi_ops": "allranks.tensorflow",
    "horovod.tensorflow.sync_batch_norm": "allranks.tensorflow",
    "horovod.tensorflow.util": "allranks.tensorflow",
    "horovod.tensorflow": "allranks.tensorflow",
    "horovod.keras": "allranks.tensorflow.keras",
    "horovod.common.elastic": "allranks.tensorflow.elastic",
    "horovod.common.exceptions": _COMMON,
    "horovod.common.process_sets": "allranks.collectives",
    "horovod.common.util": _COMMON,
    "horovod.runner.common.util.env": _RUNNER,
    "horovod.runner.common.util": _RUNNER,
    "horovod.runner.common": _RUNNER,
    "horovod.runner.util.threads": _RUNNER,
    "horovod.runner.util": _RUNNER,
    "horovod": _PACKAGE,
}
_COLLECTIVES = (
    "For arrays of any kind there are: from allranks.collectives import allreduce, broadcast"
)
# The purpose of modules that allranks does not replace, and the alternative.
_ELSEWHERE = {
    "horovod.torch": (
        "PyTorch",
        "Use torch's own: torch.distributed.init_process_group() connects the ranks without "
        "arguments, and DistributedDataParallel(model) averages gradients",
    ),
    "horovod.mxnet": ("MXNet", _COLLECTIVES),
    "horovod.spark": ("Spark", _COLLECTIVES),
    "horovod.ray": ("Ray", _COLLECTIVES),
    "horovod.data": ("Horovod's data loaders", _COLLECTIVES),
}
#: Modules of Keras 3 with fewer names than the copy of Keras inside TensorFlow has:
#: ``ImageDataGenerator``, ``pad_sequences``, ``K.mean`` and others. Scripts import them above
#: ``import horovod``; `allranks.tensorflow.compat` adds the names that they use below that line.
_KERAS_MODULES = (
    "keras.backend",
    "keras.layers",
    "keras.losses",
    "keras.metrics",
    "keras.preprocessing",
    "keras.preprocessing.image",
    "keras.preprocessing.sequence",
)
_V1 = "tensorflow.compat.v1"
_import = builtins.__import__


def _look_up_in_tensorflow(module: ModuleType) -> None:
    look_up_in(module, f"keras._tf_keras.{module.__name__}")


_keras_names = PostImportHook(_KERAS_MODULES, _look_up_in_tensorflow)


class HorovodMissing(MissingDependency, ModuleNotFoundError):
    """A part of Horovod that this process does not have.

    A ModuleNotFoundError, so that ``try: import horovod.torch`` works as a test.
    """


class HorovodFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``horovod`` and the modules below it in allranks."""

    def __init__(self) -> None:
        self.in_notebook = False  # the notebook's kernel is never a rank
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = place_of(name)
        if place is None or _is_real(sys.modules.get("horovod")):
            return None
        # An installed Horovod is left to the finder that finds it.
        others = [finder for finder in sys.meta_path if not isinstance(finder, HorovodFinder)]
        if name == "horovod" and any(one.find_spec(name, path, target) for one in others):
            return None
        top = ".".join(name.split(".")[:2])
        if top in _ELSEWHERE:
            purpose, instead = _ELSEWHERE[top]
            raise HorovodMissing(
                f"allranks has Horovod's functions for TensorFlow and Keras, found {name}, which "
                f"is for {purpose}. {instead}"
            )
        if top in OLD_SCRIPTS and self.in_notebook:
            raise HorovodMissing(
                f"{name} runs on ranks, and this is the notebook. "
                "Begin the cell with: %%distributed"
            )
        own = importlib.util.find_spec(place)
        if own is None:
            return None
        is_package = own.submodule_search_locations is not None
        return importlib.util.spec_from_loader(name, self, origin=place, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        # The same module object under both names, so both share one state.
        module = importlib.import_module(spec.origin)
        self._specs[spec.name] = module.__spec__
        if spec.name in OLD_SCRIPTS:
            importlib.import_module("allranks.tensorflow.compat").install()
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Python has replaced the module's own spec. Its code has run already.
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def place_of(name: str) -> str | None:
    for prefix, place in PLACES.items():
        if name == prefix or name.startswith(prefix + "."):
            return place + name[len(prefix) :]
    return None


def _is_real(horovod: ModuleType | None) -> bool:
    return horovod is not None and horovod.__name__ != PLACES["horovod"]


def install(in_notebook: bool | None = None) -> bool:
    """Lets ``import horovod`` find allranks; returns whether ``ALLRANKS_HOROVOD`` allows it.

    ``in_notebook`` is whether this process is the notebook's kernel; None leaves it unchanged.
    """
    setting = config.variable_choice(SETTING, ("on", "name", "off"), "on")
    if setting == "off":
        return False
    finder = next((one for one in sys.meta_path if isinstance(one, HorovodFinder)), None)
    if finder is None:
        finder = HorovodFinder()
        sys.meta_path.insert(0, finder)
    if in_notebook is not None:
        finder.in_notebook = in_notebook
    # Scripts never run in the notebook's kernel, so Keras stays unchanged there.
    if setting == "on" and not finder.in_notebook:
        _keras_names.install()
    else:
        _keras_names.uninstall()
    return True


def uninstall() -> None:
    _keras_names.uninstall()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, HorovodFinder)]
    if _is_real(sys.modules.get("horovod")):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


def install_tensorflow() -> bool:
    """Makes ``import tensorflow`` import version 1 if ``ALLRANKS_TENSORFLOW`` is 1.

    Returns whether it is.
    """
    version = config.variable_choice(TENSORFLOW_SETTING, ("0", "1", "2"), "2")
    # Not by sys.modules["tensorflow"], because packages find version 2 there.
    if version == "1":
        builtins.__import__ = _import_version_1
    return version == "1"


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
    if _is_in_package(sys._getframe(1).f_globals if globals is None else globals):
        return _import(name, globals, locals, fromlist or (), level)
    module = _version_1()
    if name == "tensorflow":
        return module
    # ``import tensorflow.x.y`` binds ``tensorflow``; ``from tensorflow.x import z`` wants ``x``.
    inner: Any = module
    for part in name.split(".")[1:]:
        inner = getattr(inner, part, None)
    if inner is None:  # a module that is no attribute of version 1
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


def _is_in_package(globals: Mapping[str, object]) -> bool:
    if globals.get("__name__") == "__main__":
        return False
    # Code without a file is not the user's, except in a cell, which is in __main__.
    file = globals.get("__file__")
    return not isinstance(file, str) or file.startswith(_package_folders())


@functools.cache  # not at import, because sysconfig takes milliseconds
def _package_folders() -> tuple[str, ...]:
    here = os.path.abspath(__file__)
    folders = {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {sysconfig.get_path("stdlib"), sysconfig.get_path("platlib")}
    return (*folders, os.path.dirname(os.path.dirname(here)))
