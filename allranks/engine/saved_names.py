"""The variables of a rank's cells in one pickle, for another process that becomes the same rank.

Objects that several variables share stay shared, but not the memory of arrays. Functions and
classes that cells have defined are pickled with their code, and use the variables of the new
process. A variable that cannot be pickled, or not be unpickled again, is left out.
"""

from __future__ import annotations

import functools
import importlib
import io
import mmap
import os
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
from IPython.core.interactiveshell import InteractiveShell

from allranks.engine.exceptions import text_of

#: IPython's results and inputs of cells, as ``_``, ``_3``, ``_i3`` and ``_oh``.
_OF_IPYTHON = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|_[ido]h|__\w+__")
#: A larger pickle, arrays not counted, is not unpickled for a check: that needs the memory again.
_CHECKED_NBYTES = 64 << 20
_LONGEST_REASON = 120
_NAMESPACE, _CELL = "namespace", "cell"
_MAIN = "__main__"

#: Why variables are left out, by name.
LeftOut = dict[str, str]


def own_names(shell: InteractiveShell, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables that cells have made; ``fresh`` are those that each rank has."""
    hidden = shell.user_ns_hidden
    return {
        name: value
        for name, value in list(shell.user_ns.items())
        if not _OF_IPYTHON.fullmatch(name)
        and value is not hidden.get(name, hidden)
        and not is_same(value, fresh.get(name, fresh))
    }


def is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is int and type(other) is int and value == other)


def dump(
    values: Mapping[str, Any], namespace: dict[str, Any]
) -> tuple[list[memoryview | bytes], LeftOut]:
    """Returns the parts of a pickle, and what is left out; ``namespace`` has the cells' globals."""
    left: LeftOut = {}
    try:
        return _packed(values, namespace), left
    except Exception:  # an object's own way to be pickled may do anything
        pass
    good: dict[str, Any] = {}
    for name, value in values.items():
        try:
            _packed({name: value}, namespace)
        except Exception as error:
            left[name] = _reason(error)
        else:
            good[name] = value
    return _packed(good, namespace), left


def load(parts: Iterable[Any], namespace: dict[str, Any]) -> None:
    """Puts the variables of a pickle into the namespace. May raise any exception."""
    head, *buffers = parts
    unpickler = _Unpickler(io.BytesIO(head), buffers, namespace)
    sys.path[:], folder = unpickler.load()
    os.chdir(folder)
    values = unpickler.load()
    unpickler.fill_cells()
    namespace.update(values)


def _packed(values: Mapping[str, Any], namespace: dict[str, Any]) -> list[memoryview | bytes]:
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = _NamesPickler(file, buffers.append, namespace)
    pickler.dump((list(sys.path), os.getcwd()))
    pickler.dump(dict(values))
    pickler.dump_cells()
    raw = [buffer.raw() for buffer in buffers]
    if file.tell() <= _CHECKED_NBYTES:
        unpickler = _Check(io.BytesIO(file.getbuffer()), raw, dict(namespace))
        unpickler.load()
        unpickler.load()
        unpickler.fill_cells()
    return [file.getbuffer(), *raw]


def _reason(error: BaseException) -> str:
    first = next(iter(text_of(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:_LONGEST_REASON]


class _NamesPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles functions of cells without their globals.

    The cells of closures come last, because a closure may contain its own function.
    """

    def __init__(
        self,
        file: io.BytesIO,
        take_buffer: Callable[[pickle.PickleBuffer], object],
        namespace: dict[str, Any],
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=take_buffer)
        self._namespace = namespace
        self._cells: list[types.CellType] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if value is self._namespace:
            return (_NAMESPACE,)
        if type(value) is not types.CellType:
            return None
        number = self._numbers.setdefault(id(value), len(self._cells))
        if number == len(self._cells):
            self._cells.append(value)
        return _CELL, number

    def reducer_override(self, value: Any) -> Any:
        if type(value) is types.FunctionType:
            return self._reduced(value)
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == _MAIN:
            return _make_cached, (value.__wrapped__, value.cache_parameters())
        base = getattr(value, "_mmap", None)
        if isinstance(base, mmap.mmap):
            raise pickle.PicklingError("it is mapped to a file")
        return super().reducer_override(value)

    def _reduced(self, function: types.FunctionType) -> Any:
        namespace: dict[str, Any] | str = self._namespace
        if function.__globals__ is not self._namespace:
            if (reduced := super().reducer_override(function)) is NotImplemented:
                return reduced  # a function of a module, by its name
            # One that a function of a module has made, such as a decorator.
            namespace = str(function.__globals__.get("__name__"))
            if vars(sys.modules.get(namespace, object)) is not function.__globals__:
                raise pickle.PicklingError(f"{function.__qualname__} has globals of its own")
        made = (function.__code__, namespace, function.__name__, function.__closure__)
        return _make_function, made, _state_of(function), None, None, _set_state

    def dump_cells(self) -> None:
        done = 0
        while done < len(self._cells):
            at, done = done, len(self._cells)
            # An empty cell is an empty tuple.
            self.dump([_contents(cell) for cell in self._cells[at:done]])
        self.dump(None)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Iterable[Any], namespace: dict[str, Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._namespace = namespace
        self._cells: list[types.CellType] = []

    def find_class(self, module: str, name: str) -> Any:
        if module == _MAIN:  # it is there now, and not in a new process
            raise pickle.PicklingError(f"it refers to {name} by name")
        return super().find_class(module, name)

    def persistent_load(self, told: Sequence[Any]) -> Any:
        kind, *numbers = told
        if kind == _NAMESPACE:
            return self._namespace
        (number,) = numbers
        while number >= len(self._cells):
            self._cells.append(types.CellType())
        return self._cells[number]

    def fill_cells(self) -> None:
        number = 0
        while (filled := self.load()) is not None:
            for contents in filled:
                for value in contents:
                    self._cells[number].cell_contents = value
                number += 1


class _Check(_Unpickler):
    """Unpickles in the process that has pickled, where cloudpickle finds the same classes again."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_class_setstate":
            return lambda found, state: found  # the classes stay as they are
        return super().find_class(module, name)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _make_function(
    code: types.CodeType,
    namespace: dict[str, Any] | str,
    name: str,
    closure: tuple[types.CellType, ...] | None,
) -> types.FunctionType:
    if isinstance(namespace, str):
        namespace = vars(importlib.import_module(namespace))
    return types.FunctionType(code, namespace, name, None, closure)


def _make_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


_ATTRIBUTES = (
    *("__defaults__", "__kwdefaults__", "__qualname__", "__module__", "__doc__"),
    *("__annotations__", "__type_params__"),
)


def _state_of(function: types.FunctionType) -> dict[str, Any]:
    state = {name: getattr(function, name) for name in _ATTRIBUTES if hasattr(function, name)}
    return {**state, "__dict__": vars(function)}


def _set_state(function: types.FunctionType, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name == "__dict__":
            vars(function).update(value)
        else:
            setattr(function, name, value)
