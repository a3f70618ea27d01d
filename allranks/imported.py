"""Something to be done to a module as soon as it has been imported, by whomever.

Both sides; standard library only.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Act = Callable[[ModuleType], object]


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and does something to each once it has been run.

    Args:
        names: of the modules.
        act: is given each of them.
    """

    def __init__(self, names: Collection[str], act: Act) -> None:
        self._names, self._act = names, act

    def install(self) -> None:
        """From now on it is done; modules that have been imported already are done at once."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in self._names:
            if name in sys.modules:
                self._act(sys.modules[name])

    def uninstall(self) -> None:
        """Modules that are imported from now on are left as they are."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns what the other finders have found, with a loader that acts afterwards."""
        if name not in self._names:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Acting(spec.loader, self._act)
        return spec


class _Acting(importlib.abc.Loader):
    """A module's own loader, which acts when the module has been run."""

    def __init__(self, own: Any, act: Act) -> None:
        self._own, self._act = own, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns what the module's own loader makes."""
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, and acts."""
        self._own.exec_module(module)
        self._act(module)
