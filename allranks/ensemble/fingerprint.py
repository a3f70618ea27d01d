"""A name for the values of a member, by which a store finds its result again.

Functions and classes of the notebook count with their code, and with all that they use: defaults,
closures, globals, helper functions, base classes. What an imported module does is not looked at.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import io
import pickle
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle

_ATOMS = (type(None), type(...), str, bytes, bool, int, float, complex)
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_NOT_CODE = frozenset(
    # The last is what copyreg notes where an instance has been pickled.
    (
        *("__dict__", "__weakref__", "__module__", "__firstlineno__", "__static_attributes__"),
        "__slotnames__",
    )
)


def key_of(values: Mapping[str, Any]) -> str:
    """Returns a name for these values, the same in every process."""
    digest = hashlib.blake2b(digest_size=12)
    for name in sorted(values):
        digest.update(f"{name}=".encode() + _Reader().read(values[name]) + b";")
    return digest.hexdigest()


class _Reader:
    """Reads one value; what it has met before it names by its place.

    Args:
        before: a reader whose places it knows.
    """

    def __init__(self, before: _Reader | None = None) -> None:
        self._places: dict[int, int] = before._places.copy() if before else {}
        self._met: list[Any] = before._met.copy() if before else []

    def read(self, value: Any) -> bytes:
        """Returns bytes that differ where what a member gets differs."""
        if type(value) in _ATOMS:
            return f"{type(value).__name__}:{value!r}".encode()
        if id(value) in self._places:
            return f"#{self._places[id(value)]}".encode()
        self._places[id(value)] = len(self._met)
        self._met.append(value)  # alive, so that its id is its own
        kind, parts = self._parts(value)
        return kind.encode() + b"(" + b",".join(parts) + b")"

    def _all(self, values: Iterable[Any]) -> list[bytes]:
        return [self.read(value) for value in values]

    def _items(self, values: Mapping[Any, Any]) -> list[bytes]:
        return [self.read(key) + b":" + self.read(value) for key, value in values.items()]

    def _parts(self, value: Any) -> tuple[str, list[bytes]]:
        kind = type(value)
        if kind in (list, tuple):
            return kind.__name__, self._all(value)
        if kind in (set, frozenset):  # in another order in each process
            return kind.__name__, sorted(_Reader(self).read(one) for one in value)
        if kind is dict:
            return "dict", self._items(value)
        if kind is FunctionType:
            return f"function {_name(value)}", self._function(value) if _is_own(value) else []
        if kind is CodeType:
            return "code", self._code(value)
        if kind is MethodType:
            return "method", self._all((value.__func__, value.__self__))
        if kind is functools.partial:
            return "partial", self._all((value.func, value.args, value.keywords))
        if kind in (staticmethod, classmethod):
            return kind.__name__, [self.read(value.__func__)]
        if kind is property:
            return "property", self._all((value.fget, value.fset, value.fdel))
        if kind in _AROUND:
            return kind.__name__, [self.read(getattr(value, _AROUND[kind]))]
        if kind is ModuleType:
            return f"module {value.__name__}", []
        if isinstance(value, type):
            return f"class {_name(value)}", self._class(value) if _is_own(value) else []
        if _is_own(kind):
            return f"instance {_name(kind)}", self._instance(value)
        return _name(kind), [self._pickled(value)]

    def _function(self, function: FunctionType) -> list[bytes]:
        names = sorted(_globals_of(function.__code__) & function.__globals__.keys())
        cells = (_content(cell) for cell in function.__closure__ or ())
        return [
            *self._all((function.__code__, function.__defaults__, function.__kwdefaults__)),
            *self._all(cells),
            *self._items({name: function.__globals__[name] for name in names}),
            *self._items(function.__dict__),
        ]

    def _code(self, code: CodeType) -> list[bytes]:
        """Reads what it does, and not where it stands in the notebook."""
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return self._all((code.co_code, code.co_exceptiontable, counts, names, code.co_consts))

    def _class(self, kind: type) -> list[bytes]:
        members = {n: v for n, v in sorted(vars(kind).items()) if n not in _NOT_CODE}
        members = {n: v for n, v in members.items() if not n.startswith("_abc_")}
        # Descriptors of slots and the like are made of what stands beside them.
        code = {n: v for n, v in members.items() if type(v).__name__ not in _MADE_BY_TYPE}
        return [*self._all((type(kind), kind.__bases__)), *self._items(code)]

    def _instance(self, value: Any) -> list[bytes]:
        try:
            made = value.__reduce_ex__(4)
        except Exception:
            return [self.read(type(value)), self._pickled(value)]
        if isinstance(made, str):
            return [self.read(type(value)), made.encode()]
        contents = [list(part) if hasattr(part, "__next__") else part for part in made]
        return self._all((type(value), *contents))

    def _pickled(self, value: Any) -> bytes:
        """Reads what a library has made.

        Returns:
            A digest of its pickle, in which the notebook's functions and classes stand with their
            content; of what cannot be pickled the name of its class, as no rank can get it.
        """
        for pickled in (self._dumped, cloudpickle.dumps):
            places = self._places.copy()
            try:
                return hashlib.blake2b(pickled(value)).digest()
            except Exception:
                self._places = places  # the digest has nothing of what was met meanwhile
        return type(value).__qualname__.encode()

    def _dumped(self, value: Any) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self).dump(value)
        return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles a value; where pickle would name a function or class of the notebook, it is read.

    Args:
        file: where the pickle is written.
        reader: reads those functions and classes.
    """

    def __init__(self, file: io.BytesIO, reader: _Reader) -> None:
        super().__init__(file, protocol=5)
        self._reader = reader

    def persistent_id(self, obj: Any) -> bytes | None:
        """Returns what stands in the place of an object; None where that is its own pickle."""
        is_own = isinstance(obj, type | FunctionType) and _is_own(obj)
        return self._reader.read(obj) if is_own or type(obj) in _AROUND else None


#: What functools makes around a function, and where it keeps that.
_AROUND: dict[type, str] = {
    type(functools.lru_cache(len)): "__wrapped__",
    functools.cached_property: "func",
}
_MADE_BY_TYPE = frozenset(
    ("getset_descriptor", "member_descriptor", "wrapper_descriptor", "method_descriptor")
)


def _is_own(value: Any) -> bool:
    """Whether a function or class is the notebook's, or is made in a function."""
    module = getattr(value, "__module__", None)
    found: Any = sys.modules.get(module) if module else None
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return module == "__main__" or found is not value


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _globals_of(code: CodeType) -> set[str]:
    found = {one.argval for one in dis.get_instructions(code) if one.opname in _GLOBALS}
    for part in code.co_consts:
        if isinstance(part, CodeType):
            found |= _globals_of(part)
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return ...
