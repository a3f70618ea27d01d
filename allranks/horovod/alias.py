"""Has ``import horovod.tensorflow`` find allranks where Horovod itself is not installed.

An installed Horovod always wins: the name is taken where no other finder knows it. What lies below
it is found here first, because another finder would load a second copy of what allranks has loaded.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from allranks.errors import MissingDependency
from allranks.horovod import above
from allranks.records import settings

#: Where the parts of Horovod are found; what lies below one of them is found below its place.
PLACES = {
    "horovod.tensorflow.functions": "allranks.tensorflow",
    "horovod.tensorflow.mpi_ops": "allranks.tensorflow",
    "horovod.tensorflow.sync_batch_norm": "allranks.tensorflow",
    "horovod.tensorflow.util": "allranks.tensorflow.internals",
    "horovod.tensorflow": "allranks.tensorflow",
    "horovod.keras": "allranks.tensorflow.keras",
    "horovod.common.elastic": "allranks.tensorflow.elastic",
    "horovod.common.process_sets": "allranks.collectives",
    "horovod": "allranks.horovod",
}
_ELSEWHERE = {
    "horovod.torch": "PyTorch",
    "horovod.mxnet": "MXNet",
    "horovod.spark": "Spark",
    "horovod.ray": "Ray",
    "horovod.data": "Horovod's data loaders",
}
#: Scripts that come by the name horovod were written for an older TensorFlow.
OLD_SCRIPTS = ("horovod.tensorflow", "horovod.keras")


class NotHere(MissingDependency, ModuleNotFoundError):
    """A part of Horovod that is not to be had in this process; who asks if it is there hears no."""


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``horovod`` and what is below it in allranks.

    Attributes:
        in_notebook: whether this process is the notebook's kernel, which never is a rank.
    """

    def __init__(self) -> None:
        self.in_notebook = False
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns where a name of Horovod's is found, or None for every other name."""
        place = place_of(name)
        if place is None or _is_anothers(sys.modules.get("horovod")):
            return None
        if name == "horovod" and self._is_installed(path, target):
            return None
        top = ".".join(name.split(".")[:2])
        if top in _ELSEWHERE:
            raise NotHere(
                f"allranks has Horovod's functions for TensorFlow and Keras, found {name}, which "
                f"is for {_ELSEWHERE[top]}. For arrays of any kind there are: "
                "from allranks.collectives import allreduce, broadcast"
            )
        if top in OLD_SCRIPTS and self.in_notebook:
            raise NotHere(
                f"{name} runs on ranks, and this is the notebook. "
                "Begin the cell with: %%distributed"
            )
        own = importlib.util.find_spec(place)
        if own is None:
            return None
        is_package = own.submodule_search_locations is not None
        return importlib.util.spec_from_loader(name, self, origin=place, is_package=is_package)

    def _is_installed(self, path: Sequence[str] | None, target: ModuleType | None) -> bool:
        others = [finder for finder in sys.meta_path if not isinstance(finder, Alias)]
        return any(other.find_spec("horovod", path, target) is not None for other in others)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns allranks' own module, under its second name."""
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        self._specs[spec.name] = module.__spec__
        if spec.name in OLD_SCRIPTS:
            importlib.import_module("allranks.tensorflow.older").mend()
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module as its first import made it."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def place_of(name: str) -> str | None:
    """Returns the module of allranks that stands for one of Horovod, None for another's name."""
    for prefix, place in PLACES.items():
        if name == prefix or name.startswith(prefix + "."):
            return place + name[len(prefix) :]
    return None


def _is_anothers(horovod: ModuleType | None) -> bool:
    """Whether a real Horovod has been imported."""
    return horovod is not None and horovod.__name__ != PLACES["horovod"]


def install(in_notebook: bool | None = None) -> bool:
    """From now on ``import horovod`` finds allranks where there is no Horovod.

    Does nothing where the environment's ``ALLRANKS_HOROVOD`` is ``off``; returns whether the name
    is found now.

    Args:
        in_notebook: whether this process is the notebook's kernel; None where that is said
            already.

    Raises:
        UsageError: the environment says what is not known.
    """
    if settings.horovod() == "off":
        return False
    found = next((finder for finder in sys.meta_path if isinstance(finder, Alias)), None)
    if found is None:
        found = Alias()
        sys.meta_path.insert(0, found)
    if in_notebook is not None:
        found.in_notebook = in_notebook
    if settings.horovod() == "on" and not found.in_notebook:
        above.install()
    else:
        above.uninstall()
    return True


def uninstall() -> None:
    """``import horovod`` finds Horovod only."""
    above.uninstall()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Alias)]
    if _is_anothers(sys.modules.get("horovod")):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]
