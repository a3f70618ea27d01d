"""Functions and names as they were before any cell, to be restored before each test."""

from __future__ import annotations

import builtins
import copyreg
import gc
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from allranks.errors import UsageError

#: All functions of these and of the modules in them are restored; a rank has imported numpy in any
#: case. Seeds of random numbers come from ``secrets``.
_LIBRARIES = ("builtins", "numpy", "random", "secrets")
_IMPORTED = ("numpy.linalg", "numpy.random", "numpy.testing", "secrets")
#: Functions and classes that these define are restored, and the methods of the classes.
_OWN = ("allranks", "mpi4py", "IPython", "ipykernel")
_OURS = "allranks."
_METHODS = (FunctionType, property, classmethod, staticmethod)
#: The kernel replaces these itself while a cell runs.
_OF_THE_KERNEL = {"input", "exit", "quit"}
_CODE = ("__code__", "__defaults__", "__kwdefaults__")
_TRANSFORMERS = ("input_transformers_post", "ast_transformers")
_TRANSFORMS = ("cleanup_transforms", "line_transforms", "token_transformers")
_WORD = re.compile(r"\w+")


class Originals:
    """What cells may have replaced by the time a test runs.

    ``given`` are the names that each cell finds, as ``rank``.
    """

    def __init__(self, shell: InteractiveShell, given: Mapping[str, Any], on_rank: bool) -> None:
        self.on_rank = on_rank
        self._shell = shell
        self._given = dict(given)
        self._modules = {
            name: module
            for name, module in sys.modules.items()
            if name.partition(".")[0] in (*_LIBRARIES, *_OWN)
        }
        #: The names in each module and class: others could cover those of Python or a base class.
        self._names: dict[Any, frozenset[str]] = {}
        self._attributes = list(self._found())
        self._code = [
            (value, name, getattr(value, name))
            for _, _, found in self._attributes
            # Many functions of numpy call another one, which is in no module.
            for value in (found, getattr(found, "__wrapped__", None))
            if isinstance(value, FunctionType)
            for name in _CODE
        ]
        self._objects = [
            (one, type(one), {k: v for k, v in vars(one).items() if callable(v)})
            for one in (shell, shell.compile)
        ]
        self._manager = shell.input_transformer_manager
        # Newer versions of IPython load ``%%time``, ``%%writefile`` and others now.
        for name in ("ExecutionMagics", "HistoryMagics", "OSMagics", "ScriptMagics"):
            _ = shell.magics_manager.registry[name]
        self._lists = [
            (owner, name, list(getattr(owner, name)))
            for owner, names in ((shell, _TRANSFORMERS), (self._manager, _TRANSFORMS))
            for name in names
        ]

    def _found(self) -> Iterator[tuple[Any, str, Any]]:
        classes = dict.fromkeys(
            kind for kind in type(self._shell).__mro__ if kind.__module__ != "builtins"
        )
        for module_name, module in self._modules.items():
            if module is not builtins:
                self._names[module] = frozenset(vars(module))
            for name, value in list(vars(module).items()):
                if not callable(value) or name in _OF_THE_KERNEL:
                    continue
                if module_name.partition(".")[0] in _LIBRARIES or module_name == "mpi4py.MPI":
                    yield module, name, value
                elif _is_defined(name, value):
                    yield module, name, value
                    if isinstance(value, type):
                        classes[value] = None
        for kind in classes:
            self._names[kind] = frozenset(vars(kind))
            for name, value in list(vars(kind).items()):
                if isinstance(value, FunctionType | property | classmethod | staticmethod):
                    yield kind, name, value

    def restore(self, source: str) -> None:
        """Undoes what cells have replaced, for a test of this source."""
        # First: the next lines use Python's own functions.
        for owner, name, value in self._attributes:
            if owner is builtins:
                vars(builtins)[name] = value
        sys.modules.update(self._modules)
        for owner, name, value in self._attributes:
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
        for function, name, value in self._code:
            if getattr(function, name) is not value:
                setattr(function, name, value)
        for owner, names in self._names.items():
            for name in vars(owner).keys() - names:
                if _covers(owner, name):
                    delattr(owner, name)
        self._restore_objects()
        self._restore_shell()
        # Not the other names: a solution may use them for something else.
        for name in self._given.keys() & set(_WORD.findall(source)):
            self._shell.user_ns[name] = self._given[name]

    def _restore_objects(self) -> None:
        """Removes what covers methods of our objects, and how our classes are pickled."""
        for one in gc.get_objects():
            kind = type(one)
            if not str(kind.__module__).startswith(_OURS):
                continue
            try:
                own = object.__getattribute__(one, "__dict__")
            except AttributeError:  # it has slots
                continue
            for name in [name for name in own if _is_method(kind, name) and callable(own[name])]:
                del own[name]
        for kind in self._names.keys() & copyreg.dispatch_table.keys():
            del copyreg.dispatch_table[kind]

    def _restore_shell(self) -> None:
        shell = self._shell
        for one, kind, own in self._objects:
            if type(one) is not kind:
                object.__setattr__(one, "__class__", kind)
            for name, value in list(vars(one).items()):
                if callable(value) and name not in own and hasattr(kind, name):
                    delattr(one, name)
            vars(one).update(own)
        shell.input_transformer_manager = self._manager
        for owner, name, values in self._lists:
            setattr(owner, name, list(values))
        for magics in list(shell.magics_manager.registry.values()):
            if type(magics).__module__.partition(".")[0] in ("IPython", "ipykernel", "allranks"):
                for kind, found in magics.magics.items():
                    shell.magics_manager.magics[kind].update(found)


def _covers(owner: Any, name: str) -> bool:
    """Whether a new name of a module or class takes the place of Python's or of a base class's."""
    value = vars(owner)[name]
    if not (callable(value) or hasattr(type(value), "__get__")):
        return False
    if isinstance(owner, ModuleType):
        return hasattr(builtins, name)
    return any(name in vars(base) for base in owner.__mro__[1:])


def _is_method(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), _METHODS)


def _is_defined(name: str, value: Any) -> bool:
    """Whether it is a function or class of allranks or mpi4py under its own name."""
    return (
        isinstance(value, FunctionType | type)
        and value.__name__ == name
        and str(value.__module__).partition(".")[0] in _OWN
    )


kept: Originals | None = None
"""Those of this process; None if it runs no tests."""


def keep(shell: InteractiveShell, given: Mapping[str, Any], *, on_rank: bool) -> Originals:
    """Keeps the functions and names of this moment."""
    global kept
    for name in _IMPORTED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    kept = Originals(shell, given, on_rank)
    return kept


def passed(path: str, on_ranks: bool) -> None:
    """Makes the file of a test that has run to its end, in a process that kept its originals.

    Args:
        path: the file.
        on_ranks: whether the test has a magic that sends it to the ranks. Without one it may run
            there too, as after ``%distributed on``.
    """
    if kept is None or (on_ranks and not kept.on_rank):
        where = "the ranks" if on_ranks else "the kernel"
        raise UsageError(
            f"expected a test that runs on {where} as the grader has started them; found that an "
            "earlier cell has changed that. Remove what it does to the kernel."
        )
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
