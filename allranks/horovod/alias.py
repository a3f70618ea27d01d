"""``import horovod`` finds allranks where Horovod itself is not installed. Standard library only.

An installed Horovod has priority: this finder handles ``horovod`` only if no other finder finds it.
The modules below it are found here first, because another finder would load a second copy of a
module that is already loaded under its name in allranks.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from allranks.errors import MissingDependency
from allranks.horovod.runner import OLD_SCRIPTS
from allranks.post_import import PostImportHook
from allranks.records import settings

# `on`; `name`: lines for older versions of TensorFlow and Keras do not work; or `off`.
SETTING = "ALLRANKS_HOROVOD"

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
_ELSEWHERE = {
    "horovod.torch": "PyTorch",
    "horovod.mxnet": "MXNet",
    "horovod.spark": "Spark",
    "horovod.ray": "Ray",
    "horovod.data": "Horovod's data loaders",
}
_INSTEAD = {
    "horovod.torch": (
        "Use torch's own: torch.distributed.init_process_group() connects the ranks without "
        "arguments, and DistributedDataParallel(model) averages gradients"
    )
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


def _look_up_in_tensorflow(module: ModuleType) -> None:
    if "__getattr__" in vars(module):
        return

    def find(name: str) -> Any:
        if not name.startswith("_"):
            try:
                return getattr(importlib.import_module(f"keras._tf_keras.{module.__name__}"), name)
            except (ImportError, AttributeError):
                pass
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = find


_keras_names = PostImportHook(_KERAS_MODULES, _look_up_in_tensorflow)


class HorovodMissing(MissingDependency, ModuleNotFoundError):
    """A part of Horovod that this process does not have.

    A ModuleNotFoundError, so that ``try: import horovod.torch`` works as a test.
    """


class HorovodFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``horovod`` and the modules below it in allranks.

    Attributes:
        in_notebook: whether this process is the notebook's kernel, which is never a rank.
    """

    def __init__(self) -> None:
        self.in_notebook = False
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a spec for a module of Horovod's, None for every other name."""
        place = place_of(name)
        if place is None or _is_real(sys.modules.get("horovod")):
            return None
        # An installed Horovod is left to the finder that finds it.
        if name == "horovod" and self._is_installed(path, target):
            return None
        top = ".".join(name.split(".")[:2])
        if top in _ELSEWHERE:
            instead = _INSTEAD.get(
                top,
                "For arrays of any kind there are: "
                "from allranks.collectives import allreduce, broadcast",
            )
            raise HorovodMissing(
                f"allranks has Horovod's functions for TensorFlow and Keras, found {name}, which "
                f"is for {_ELSEWHERE[top]}. {instead}"
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

    def _is_installed(self, path: Sequence[str] | None, target: ModuleType | None) -> bool:
        others = [finder for finder in sys.meta_path if not isinstance(finder, HorovodFinder)]
        return any(other.find_spec("horovod", path, target) is not None for other in others)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module of allranks, to be used under its second name."""
        assert spec.origin is not None
        # The same module object under both names, so both share one state.
        module = importlib.import_module(spec.origin)
        self._specs[spec.name] = module.__spec__
        if spec.name in OLD_SCRIPTS:
            importlib.import_module("allranks.tensorflow.compat").install()
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec, which Python has replaced; its code has run already."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def place_of(name: str) -> str | None:
    """Returns the name of the module that replaces one of Horovod, None for any other name."""
    for prefix, place in PLACES.items():
        if name == prefix or name.startswith(prefix + "."):
            return place + name[len(prefix) :]
    return None


def _is_real(horovod: ModuleType | None) -> bool:
    return horovod is not None and horovod.__name__ != PLACES["horovod"]


def install(in_notebook: bool | None = None) -> bool:
    """Lets ``import horovod`` find allranks where Horovod is not installed.

    Does nothing if the environment's ``ALLRANKS_HOROVOD`` is ``off``.

    Args:
        in_notebook: whether this process is the notebook's kernel; None leaves it unchanged.

    Returns:
        Whether ``import horovod`` works from now on.

    Raises:
        UsageError: ``ALLRANKS_HOROVOD`` has an unknown value.
    """
    setting = settings.chosen(SETTING, ("on", "name", "off"), "on")
    if setting == "off":
        return False
    finder = next((one for one in sys.meta_path if isinstance(one, HorovodFinder)), None)
    if finder is None:
        finder = HorovodFinder()
        sys.meta_path.insert(0, finder)
    if in_notebook is not None:
        finder.in_notebook = in_notebook
    # The notebook's kernel is never a rank, so Keras stays unchanged there.
    if setting == "on" and not finder.in_notebook:
        _keras_names.install()
    else:
        _keras_names.uninstall()
    return True


def uninstall() -> None:
    """Removes the finder: ``import horovod`` finds Horovod only."""
    _keras_names.uninstall()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, HorovodFinder)]
    if _is_real(sys.modules.get("horovod")):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]
