"""Objects as bytes, in which a class or function of a cell is the receiver's own.

cloudpickle sends the classes and functions of cells by value, so each receiver would make a second
class. Here the bytes contain the name, a digest of the definition, and the value. The receiver
takes its own class if name and digest agree; otherwise it makes one of the value. The value is in
each message, because a receiver may have missed an earlier one, as after an interrupt.

A name refers to the class that the sender's module has under it now: an older class of this name is
sent by value. A class that a function has made has no such name. The receiver's own is then the
latest one with this definition, and the definition includes the variables that its methods use.
Classes and functions of cells that it consists of, as bases, are part of a definition.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import io
import linecache
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum, EnumMeta
from functools import lru_cache, partial, partialmethod
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import cloudpickle

from allranks.errors import UsageError

_LOCAL = "<locals>"
#: Py_TPFLAGS_HEAPTYPE: set for classes that are made while Python runs.
_ON_HEAP = 1 << 9
_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(...))
_OF_CLASSES = (MemberDescriptorType, GetSetDescriptorType)
#: Their functions alone do not define them.
_BOUND = (partial, partialmethod, MethodType)
_GROUPS: tuple[type, ...] = (tuple, list, dict, set, frozenset)
#: Attributes with the function of a method, a property or a wrapper of functools.
_AROUND = ("__func__", "fget", "fset", "fdel", "func", "__wrapped__")
#: A variable of which only the type counts has more items, or is nested deeper.
_COMPARED_ITEMS, _COMPARED_DEPTH = 100, 4

#: Module, name, digest, and the base of a class that a function has made.
_Sought = tuple[str, str, str, type | None]
_sent: weakref.WeakSet[Any] = weakref.WeakSet()
_made: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Classes and functions of other ranks, which this process has made of their values."""


def dumps(value: object) -> bytes:
    try:
        return _dumped(value, _Pickler)
    except Exception:
        # A class may have a lock, or use a communicator: then its name and digest are enough.
        with suppress(Exception):
            return _dumped(value, _ByNamePickler)
        raise


def _dumped(value: object, kind: type[_Pickler]) -> bytes:
    with io.BytesIO() as file:
        kind(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is not FunctionType and not issubclass(kind, type):
            return NotImplemented
        if kind is type and not value.__flags__ & _ON_HEAP and value.__module__ != "builtins":
            return NotImplemented  # as numpy.ndarray: pickle finds it by its name
        reduced = super().reducer_override(value)
        if type(reduced) is not tuple or len(reduced) != 6:
            return reduced  # by its name, as those of modules
        make, arguments, state, *_, fill = reduced
        if value not in _made:
            _sent.add(value)
        name, base, digest = value.__qualname__, None, definition(value)
        if digest and _LOCAL in name:
            base = value.__bases__[0]
        sought = value.__module__, name, digest, base
        return self.reduced(sought, (make, arguments), (fill, state))

    def reduced(self, sought: _Sought, made: Any, state: Any) -> Any:
        return _own_or_made, (sought, *made), state, None, None, _fill


class _ByNamePickler(_Pickler):
    def reduced(self, sought: _Sought, made: Any, state: Any) -> Any:
        plain = super().reduced(sought, made, state)
        return (_own_alone, (sought,)) if sought[2] else plain


def _own(sought: _Sought) -> Any:
    module, name, digest, base = sought
    if digest:
        candidates = _made_under(module, name, base) if base else [_named(module, name)]
        for own in candidates:
            if definition(own) == digest:
                return own
    return None


def _own_alone(sought: _Sought) -> Any:
    own = _own(sought)
    if own is None:
        raise UsageError(
            f"expected {sought[1]} on this rank as the sender has defined it, found none, and its "
            "value cannot be pickled. Run the cell that defines it on this rank."
        )
    return own


def _own_or_made(sought: _Sought, make: Callable[..., Any], arguments: Any) -> Any:
    own = _own(sought)
    if own is not None:
        return own
    made = make(*arguments)  # cloudpickle returns the same class for each message of one class
    if made not in _sent:
        _made[made] = sought[2]
    return made


def _fill(found: Any, state: Any) -> None:
    fill, contents = state
    if found in _made:
        fill(found, contents)


def _named(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type | FunctionType) else None


def _made_under(module: str, name: str, base: type) -> Iterator[type]:
    """The classes that functions of this process have made under that name, the latest first."""
    variables = getattr(sys.modules.get(module), "__dict__", None)
    known: list[type] = type.__subclasses__(base)
    for kind in reversed(known):
        if (kind.__module__, kind.__qualname__) == (module, name):
            functions = [one for value in vars(kind).values() for one in _functions_in(value)]
            # Simulated ranks are in one process, each with its own variables.
            if all(one.__globals__ is variables for one in functions if one.__module__ == module):
                yield kind


def definition(value: Any) -> str:
    """A digest that is the same on ranks that have defined a class or function alike.

    Empty where no other rank can have it under its name.
    """
    try:
        if value in _made:
            return _made[value]
        local, is_function = _LOCAL in value.__qualname__, type(value) is FunctionType
        if not local and _named(value.__module__, value.__qualname__) is not value:
            return ""
        if local and is_function:
            return ""
        reading = _Reading(value.__module__)
        found = reading.digest(value)
        return "" if local and reading.unknown else found
    except Exception:  # an attribute's own code may do anything
        return ""


class _Reading:
    """What a definition consists of, as nested tuples of texts.

    The values of attributes and defaults count only in functions, or if the source is not found:
    programs change them, as counters, differently on each rank.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._seen: set[int] = set()
        #: Whether a function uses a variable of which only the type counts.
        self.unknown = False

    def digest(self, value: type | FunctionType) -> str:
        read = self._function(value) if isinstance(value, FunctionType) else self._kind(value)
        return hashlib.blake2b(repr(read).encode(), digest_size=16).hexdigest()

    def _named(self, value: type | FunctionType | ModuleType) -> Any:
        """A name; for what cells have defined, as a base, also a digest."""
        if isinstance(value, ModuleType) or value.__module__ != self._module:
            return _title(value)
        return _title(value), _made.get(value) or self.digest(value)

    def _kind(self, value: type) -> Any:
        if id(value) in self._seen:
            return None
        self._seen.add(id(value))
        parts, text = [], None
        for name, attribute in sorted(vars(value).items()):
            functions = list(_functions_in(attribute))
            parts += [(name, self._function(one)) for one in functions]
            if text is None:
                text = next(filter(None, (_text_of(value, one) for one in functions)), None)
        if text is None:
            parts += [
                (name, self._content(attribute))
                for name, attribute in sorted(vars(value).items())
                if not _is_made(name) and not any(_functions_in(attribute))
            ]
        if isinstance(value, EnumMeta):
            members: dict[str, Any] = dict(value.__members__)
            parts += [(name, self._content(member.value)) for name, member in members.items()]
        fields = vars(value).get("__annotations__", {})
        types = [(name, _title(field)) for name, field in fields.items()]
        bases = [self._named(base) for base in value.__bases__]
        return self._named(type(value)), bases, text, types, parts

    def _function(self, value: FunctionType) -> Any:
        if id(value) in self._seen:
            return None
        self._seen.add(id(value))
        code, text = value.__code__, _text_of(value, value)
        given = value.__defaults__, value.__kwdefaults__
        defaults = text or [self._content(one) for one in given]
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        used = [(name, self._used(cell)) for name, cell in cells if name not in _changed(code)]
        return _read(code), defaults, used

    def _used(self, cell: CellType) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:
            return "empty"
        functions = list(_functions_in(value))
        if functions:
            return [self._function(one) for one in functions]
        return self._content(value)

    def _content(self, value: Any, depth: int = 0) -> Any:
        """A value as text; of others than numbers, texts and groups of them, the type."""
        kind = type(value)
        if kind in _PLAIN:
            return kind.__name__, repr(value)
        if isinstance(value, type | FunctionType | ModuleType):
            return self._named(value)
        if isinstance(value, Enum):
            return self._named(kind), value.name
        if kind in _BOUND:
            names = ("__func__", "__self__", "func", "args", "keywords")
            inside = (getattr(value, name) for name in names if hasattr(value, name))
            return _title(kind), [self._content(one, depth + 1) for one in inside]
        if kind not in _GROUPS or len(value) > _COMPARED_ITEMS or depth > _COMPARED_DEPTH:
            self.unknown |= kind not in _OF_CLASSES
            return _title(kind)
        items = list(value.items()) if kind is dict else value
        parts = [self._content(one, depth + 1) for one in items]
        # The order of a set differs between processes.
        return kind.__name__, sorted(map(repr, parts)) if kind in (set, frozenset) else parts


def _is_made(name: str) -> bool:
    """Whether Python or its library has made an attribute of a class, possibly at its first use."""
    return name.startswith(("__", "_abc_")) or (name[:1] == "_" == name[-1:])


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """The function that an attribute is, or those that it calls."""
    if type(value) is FunctionType:
        yield value
    elif not isinstance(value, type) and type(value) not in (*_PLAIN, *_BOUND):
        inside = (getattr(value, name, None) for name in _AROUND)
        yield from (one for one in inside if type(one) is FunctionType)


def _title(value: Any) -> str:
    """The name of a class, function or module, without its address in memory."""
    if isinstance(value, ModuleType):
        return value.__name__
    named = isinstance(value, type | FunctionType) and type(value).__name__ != "GenericAlias"
    return f"{value.__module__}.{value.__qualname__}" if named else repr(value)


@lru_cache(maxsize=1024)
def _read(code: CodeType) -> str:
    """A function's code without its place in a file, which changes when a cell runs again."""
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    parts = code.co_code, code.co_exceptiontable, counts, names, _constants(code.co_consts)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _constants(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _read(value)
    if isinstance(value, tuple):
        return [_constants(one) for one in value]
    if isinstance(value, frozenset):  # its order differs between processes
        return sorted(map(repr, map(_constants, value)))
    return type(value).__name__, repr(value)


@lru_cache(maxsize=1024)
def _changed(code: CodeType) -> frozenset[str]:
    """Variables of an outer function that a function assigns, and the class of its method."""
    stored = (one.argval for one in dis.get_instructions(code) if one.opname == "STORE_DEREF")
    # The second one has all attributes: annotations of Python 3.14 look their names up there.
    return frozenset(stored) | {"__class__", "__classdict__"}


def _text_of(value: type | FunctionType, function: FunctionType) -> str | None:
    """The statement that has defined a function, or the class of this method, if it is known."""
    code = function.__code__
    if _LOCAL in value.__qualname__:
        return None
    if not f"{function.__qualname__}.".startswith(f"{value.__qualname__}."):
        return None
    lines = linecache.getlines(code.co_filename)
    return _statements("".join(lines)).get((value.__name__, code.co_firstlineno)) if lines else None


@lru_cache(maxsize=64)
def _statements(source: str) -> dict[tuple[str, int], str]:
    """The classes and functions of a source, by their names and each of their lines."""
    found: dict[tuple[str, int], str] = {}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return found
    # The outer one of two with the same name comes first, and the inner one replaces it.
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = hashlib.blake2b(ast.dump(node).encode(), digest_size=16).hexdigest()
            # The code of a function with decorators begins in the line of the first one.
            first = min(one.lineno for one in (node, *node.decorator_list))
            last = node.end_lineno or node.lineno
            found |= {(node.name, line): text for line in range(first, last + 1)}
    return found
