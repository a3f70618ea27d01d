"""A folder that every member is written to at once when it has ended, so that a rerun goes on.

One file a member, written beside and moved into place, so that it is there whole or not at all: a
line of JSON, then its result, packed. ``ensemble.json`` has the source that they have run.

The name of a member's file is a hash of its values. A function or class of the notebook is hashed
with its code and all that it uses: defaults, closures, globals, helper functions, base classes.
Imported modules are not.
"""

from __future__ import annotations

import dis
import fcntl
import functools
import hashlib
import io
import json
import os
import pickle
import shlex
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle

from allranks import own_files
from allranks.errors import UsageError
from allranks.features.ensemble.member import (
    ENDED,
    FAILED,
    OTHERS_CAN_WRITE,
    Member,
    Place,
    SharedResult,
    distrusted,
    write,
)

_ATOMS = (type(None), type(...), str, bytes, bool, int, float, complex)
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
#: copyreg adds ``__slotnames__`` to a class when an instance is pickled.
_NOT_CODE = {
    *("__dict__", "__weakref__", "__module__", "__firstlineno__"),
    *("__static_attributes__", "__slotnames__"),
}


def key_of(values: Mapping[str, Any]) -> str:
    # The same in every process, so not by hash().
    digest = hashlib.blake2b(digest_size=12)
    for name in sorted(values):
        digest.update(f"{name}=".encode() + _Reader().read(values[name]) + b";")
    return digest.hexdigest()


class _Reader:
    # A value that has been read already, here or in `before`, is encoded by its place.
    def __init__(self, before: _Reader | None = None) -> None:
        self._places: dict[int, int] = before._places.copy() if before else {}
        self._met: list[Any] = before._met.copy() if before else []

    def read(self, value: Any) -> bytes:
        # Different bytes for different values, also across processes.
        if type(value) in _ATOMS:
            return f"{type(value).__name__}:{value!r}".encode()
        if id(value) in self._places:
            return f"#{self._places[id(value)]}".encode()
        self._places[id(value)] = len(self._met)
        self._met.append(value)  # kept alive, so that no other object gets its id
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
        if kind in (set, frozenset):  # each process has another order
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
        # The file name and the line numbers are left out: they change when a cell runs again.
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return self._all((code.co_code, code.co_exceptiontable, counts, names, code.co_consts))

    def _class(self, kind: type) -> list[bytes]:
        members = {n: v for n, v in sorted(vars(kind).items()) if n not in _NOT_CODE}
        members = {n: v for n, v in members.items() if not n.startswith("_abc_")}
        # Python makes descriptors, as those of slots, from the other attributes of the class.
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
        # A value that cannot be pickled counts by the name of its class: no rank can receive it.
        for pickled in (self._dumped, cloudpickle.dumps):
            places = self._places.copy()
            try:
                return hashlib.blake2b(pickled(value)).digest()
            except Exception:
                self._places = places  # the digest has no part of the failed attempt
        return type(value).__qualname__.encode()

    def _dumped(self, value: Any) -> bytes:
        file = io.BytesIO()
        _SourcePickler(file, self).dump(value)
        return file.getvalue()


class _SourcePickler(pickle.Pickler):
    # Functions and classes of the notebook are pickled by their content, not by their names.
    def __init__(self, file: io.BytesIO, reader: _Reader) -> None:
        super().__init__(file, protocol=5)
        self._reader = reader

    def persistent_id(self, obj: Any) -> bytes | None:
        is_own = isinstance(obj, type | FunctionType) and _is_own(obj)
        return self._reader.read(obj) if is_own or type(obj) in _AROUND else None


#: The wrappers of functools, and the attributes with the wrapped function.
_AROUND: dict[type, str] = {
    type(functools.lru_cache(len)): "__wrapped__",
    functools.cached_property: "func",
}
_MADE_BY_TYPE = (
    "getset_descriptor",
    "member_descriptor",
    "wrapper_descriptor",
    "method_descriptor",
)


def _is_own(value: Any) -> bool:
    # Also a function or class that is made in a function of an imported module.
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


_ABOUT = "ensemble.json"
_SUFFIX = ".member"
_VERSION = 1
_MOST_SOURCE = 16 << 20
_SHOWN_LENGTH = 500
#: The fields of a member that a file has as they are.
_KEPT = ("state", "seconds", "ranks", "numbers", "text", "problem", "error", "traceback")


class Store:
    """A folder of ended members; open until :meth:`close`.

    Args:
        source: the cell's source, without its first line.
        trusted: whether members stored by other users are read.

    Raises:
        UsageError: another source has written the folder, another notebook is writing it, another
            user has stored members there, or it cannot be written.
    """

    def __init__(self, path: str, source: str, trusted: bool = False) -> None:
        self._trusted = trusted
        self._names: dict[int, str] = {}
        self._seen: Counter[str] = Counter()
        self.shown = path
        #: When the oldest of the members that were read had ended, in seconds since 1970.
        self.oldest: float | None = None
        try:
            self.path = Path(path).expanduser().resolve()
            self._open(normal(source))
        except (OSError, RuntimeError) as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: Exception) -> UsageError:
        return UsageError(f"--store {self.shown} cannot be written: {error}. Type another folder.")

    def _open(self, source: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        about = self.path / _ABOUT
        if not about.exists() and any(self.path.iterdir()):
            raise UsageError(
                f"--store expected a new folder, or one of an ensemble, found {self.shown} with "
                "other files in it. Type another folder."
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(self.path / ".lock", flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_owners()
            self._check(about, source)
            for left in self.path.glob("*.tmp"):
                with suppress(OSError):  # it is not one of ours
                    left.unlink()
        except BlockingIOError:
            os.close(self._lock)
            raise UsageError(
                f"--store {self.shown} is being written by another notebook. "
                "Type another folder, or interrupt the cell there."
            ) from None
        except BaseException:
            os.close(self._lock)
            raise

    def _check_owners(self) -> None:
        if self._trusted:
            return
        paths = sorted(self.path.glob(f"*{_SUFFIX}"))
        # Another user's lock is no harm. One of this user shows the rights that new files get.
        if os.fstat(self._lock).st_uid == os.geteuid():
            paths.insert(0, self.path / ".lock")
        foreign = [(path, why) for path in paths if (why := distrusted(str(path)))]
        if not foreign:
            return
        path, why = foreign[0]
        count = sum(reason == why for _, reason in foreign)
        # The name may be another user's: no escape codes for a terminal.
        found = f"found {count} {why}, as {_shown(str(path))} with mode "
        found += f"{path.lstat().st_mode & 0o7777:o}"
        pickles = "results are pickles, which may run any code when they are read"
        if why == OTHERS_CAN_WRITE:
            folder = shlex.quote(str(self.path))
            raise UsageError(
                f"--store {self.shown} expected files that only you can write, {found}: {pickles}. "
                f"If no other user has written there, type: !chmod -R go-w {folder}\n"
                "If that does not change the mode, the file system keeps no rights. If you trust "
                "all who can write there, add: --trust-store"
            )
        raise UsageError(
            f"--store {self.shown} expected members that only you have stored, {found}: {pickles}. "
            "If you trust who wrote them, add: --trust-store"
        )

    def _check(self, about: Path, source: str) -> None:
        if not about.exists():
            self._replace(about, json.dumps({"version": _VERSION, "source": source}).encode())
            return
        try:
            with open(own_files.open_any_file(str(about)), encoding="utf-8") as file:
                text = file.read(_MOST_SOURCE)
            # Of another user's file that is longer, no more is read, and the JSON has no end.
            before = json.loads(text)
            kept, version = str(before["source"]), before["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{about} cannot be read: {error}. Type another folder.") from error
        if version != _VERSION:
            raise UsageError(
                f"--store {self.shown} was written by another version of allranks: expected "
                f"format {_VERSION}, found {_shown(str(version))}. Type another folder."
            )
        if kept != source:
            count = len(list(self.path.glob(f"*{_SUFFIX}")))
            raise UsageError(
                f"--store {self.shown} holds {count} members of another cell: "
                f"{_first_difference(kept, source)}\n"
                f"Type another folder, such as --store {self.shown}-2, or, to forget what is in "
                f"this one: !rm -r {self.shown}"
            )

    def close(self) -> None:
        # Another notebook can take the lock now.
        os.close(self._lock)

    def forget_failed(self) -> None:
        # Failed members run again.
        for path in self.path.glob(f"*{_SUFFIX}"):
            try:
                with open(own_files.open_any_file(str(path)), "rb") as file:
                    # One that has come since the check; its line could take all memory.
                    if distrusted(file.fileno()) and not self._trusted:
                        continue
                    line = file.readline()
                try:
                    failed = json.loads(line)["state"] == FAILED
                except (ValueError, KeyError, TypeError, RecursionError):
                    failed = True  # not whole
                if failed:
                    path.unlink()
            except OSError as error:
                raise self._unwritable(error) from error

    def read(self, members: Sequence[Member]) -> list[Member]:
        # Sets the results of members that have ended before, and returns those.
        return [member for member in members if self._read(member)]

    def _read(self, member: Member) -> bool:
        path = self._path(member)
        try:
            with open(own_files.open_any_file(str(path)), "rb") as file:
                about = os.fstat(file.fileno())
                # First: a line of another user's file could take all memory.
                if distrusted(file.fileno()) and not self._trusted:
                    return False
                line = file.readline()
            head = json.loads(line)
            if head["state"] not in ENDED or about.st_size != len(line) + head["nbytes"]:
                return False
            found = Member(member.number, member.values)
            for name in _KEPT:
                setattr(found, name, head[name])
            found.ranks, found.numbers = tuple(found.ranks), dict(found.numbers)
            for name, (steps, values) in head["history"].items():
                found.log(name, array("d", steps), array("d", values))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False  # no complete file: the member runs
        member.become(found)
        ended = about.st_mtime
        self.oldest = min(ended, self.oldest or ended)
        if head["nbytes"]:
            member.place = Place(path, len(line), head["nbytes"], self._trusted)
        return True

    def write(self, member: Member, packed: bytes | SharedResult) -> None:
        # From now on the member's result is read from the file.
        path = self._path(member)
        head = {
            "number": member.number,
            "values": {name: repr(value) for name, value in member.values.items()},
            **{name: getattr(member, name) for name in _KEPT},
            "history": {
                name: _points(series.steps, series.values, series.last)
                for name, series in member.series.items()
            },
            "nbytes": len(packed),
        }
        line = json.dumps(head).encode() + b"\n"
        try:
            self._replace(path, line, packed)
        except OSError as error:
            raise UsageError(
                f"--store {self.shown} cannot be written any more: {error}. Members that ended "
                "before are kept; free some space, and run the cell again."
            ) from error
        if len(packed):
            member.place = Place(path, len(line), len(packed), self._trusted)

    def _replace(self, path: Path, head: bytes, packed: bytes | SharedResult = b"") -> None:
        # A new file: others who can write to the folder could have put a link there.
        descriptor, name = tempfile.mkstemp(".tmp", f"{path.name}.", path.parent)
        beside = Path(name)
        try:
            write(descriptor, head)
            write(descriptor, packed)
            os.fsync(descriptor)
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _path(self, member: Member) -> Path:
        if member.number not in self._names:
            key = key_of(member.values)
            again = f"-{self._seen[key]}" if self._seen[key] else ""
            self._seen[key] += 1
            self._names[member.number] = f"{key}{again}{_SUFFIX}"
        return self.path / self._names[member.number]


def _points(
    steps: array[float], values: array[float], last: tuple[float, float]
) -> tuple[list[float], list[float]]:
    told = list(steps), list(values)
    if steps and steps[-1] != last[0]:
        told[0].append(last[0])
        told[1].append(last[1])
    return told


def normal(source: str) -> str:
    # Blank lines around a cell and spaces at line ends do not count as a change.
    return "\n".join(line.rstrip() for line in source.strip("\n").splitlines())


def _shown(text: str) -> str:
    """Returns the beginning of another user's text, with printable characters only."""
    kept = "".join(one if one.isprintable() else "?" for one in text[:_SHOWN_LENGTH])
    return kept + "…" * (len(text) > _SHOWN_LENGTH)


def _first_difference(kept: str, source: str) -> str:
    before, now = kept.splitlines(), source.splitlines()
    for number, (old, new) in enumerate(zip(before, now, strict=False), 2):
        if old != new:
            was, now_is = (_shown(repr(line.strip())) for line in (old, new))
            return f"line {number} was {was} there, and is {now_is} here."
    return f"it had {len(before)} lines there, and has {len(now)} here."
