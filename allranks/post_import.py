"""Changes of modules that others import: hooks that run after an import, and missing names.

Both sides; standard library only.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Act = Callable[[ModuleType], object]


class PostImportHook(importlib.abc.MetaPathFinder):
    """A finder that calls a function with each of some modules, after the module has run."""

    def __init__(self, names: Collection[str], act: Act) -> None:
        self._names, self._act = names, act

    def install(self) -> None:
        # Modules that are already imported have their call at once.
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in self._names:
            if name in sys.modules:
                self._act(sys.modules[name])

    def uninstall(self) -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            # The loader of the other finders runs the module, then ours calls the function.
            spec.loader = _ActingLoader(spec.loader, self._act)
        return spec


class _ActingLoader(importlib.abc.Loader):
    def __init__(self, own: Any, act: Act) -> None:
        self._own, self._act = own, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        self._act(module)


def look_up_in(module: ModuleType, other: str) -> None:
    """Lets a module find the names that it lacks in another one, imported when needed."""
    if "__getattr__" in vars(module):
        return

    def look_up(name: str) -> Any:
        if not name.startswith("_"):
            with suppress(ImportError, AttributeError):
                return getattr(importlib.import_module(other), name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = look_up
