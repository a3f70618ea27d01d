"""Describes the variables of a rank, for the notebook to compare them with those of others."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from allranks.engine.features import Answered, RankContext, RankFeature

REQUEST = "variables"
#: Values of more bytes, or more parts, are not compared, nor those after this time.
_MOST_NBYTES, _MOST_PARTS, _SECONDS = 4 << 20, 1000, 0.2
_TEXT_LENGTH = 80
#: repr() refuses longer integers.
_MOST_BITS = 10_000
#: Arrays of other packages may be files, computations, or on several ranks.
_ARRAYS = ("numpy", "torch", "jax", "jaxlib", "tensorflow", "keras", "pandas")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (ModuleType, FunctionType, BuiltinFunctionType, type)


class VariableDescriptions(RankFeature):
    """Answers with the kind, a short text and a digest of each of the user's variables."""

    requests = frozenset({REQUEST})

    def started(self, rank: RankContext) -> None:
        self._names = rank.shell.user_ns
        # Names that every rank has from the start are not the user's, unless they are assigned.
        self._given = dict(self._names)

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        late = time.monotonic() + _SECONDS
        found = [(name, value) for name, value in self._names.items() if self._is_users(name)]
        return {"variables": {n: describe(value, late) for n, value in sorted(found)}}, []

    def _is_users(self, name: Any) -> bool:
        value = self._names[name]
        own = value is not self._given.get(name, self)
        named = isinstance(name, str) and not name.startswith("_") and name not in ("In", "Out")
        return own and named and not isinstance(value, _CODE)


def describe(value: Any, late: float) -> tuple[str, str, str]:
    """Returns the kind, a text and a digest of a value; the last two may be empty."""
    kind, text = type(value).__name__[:_TEXT_LENGTH], ""
    in_time = time.monotonic() < late
    try:
        # Arrays of any library. repr() of other objects may take long or have side effects.
        if _is_array(value):
            dtype = str(value.dtype).removeprefix("torch.")[:_TEXT_LENGTH]
            kind = f"{kind} {dtype} {tuple(value.shape)}"
        if in_time:
            content = _Content(value)
            if content.is_plain:
                text = repr(value)[:_TEXT_LENGTH]
            return kind, text, content.digest
    except Exception:
        pass  # it is not compared, or code of the user's has raised, as its shape
    return kind, text, ""


class _NotCompared(Exception):
    """It is too large, in another memory, or of a type whose code is the user's."""


class _Content:
    """The digest of a value; ``is_plain`` if it has numbers and texts only, so that its repr() is
    quick.

    Raises _NotCompared if it cannot be compared.
    """

    def __init__(self, value: object) -> None:
        self.is_plain = True
        self._parts = self._nbytes = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._add(value)
        self.digest = self._hash.hexdigest()

    def _add(self, value: Any) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _NotCompared
        kind = type(value)
        # Lengths, so that ["a", "b"] differs from ["ab"].
        if kind in (list, tuple, dict, set, frozenset):
            self._put(f"{kind.__name__} {len(value)}".encode())
            if len(value) > _MOST_PARTS:
                raise _NotCompared
        if kind in (list, tuple):
            for part in value:
                self._add(part)
        elif kind is dict:
            # Equal dictionaries may have another order.
            for key, part in _sorted(value.items()):
                self._add(key)
                self._add(part)
        elif kind in (set, frozenset):
            for (part,) in _sorted(zip(value)):
                self._add(part)
        elif kind in _PLAIN:
            self._add_plain(value)
        elif _is_array(value):
            self.is_plain = self.is_plain and value.shape == () and kind.__module__ == "numpy"
            self._add_array(value)
        else:
            raise _NotCompared

    def _add_plain(self, value: Any) -> None:
        if isinstance(value, str | bytes) and len(value) > _MOST_NBYTES:
            raise _NotCompared
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise _NotCompared
        self._put(type(value).__name__.encode())
        self._put(repr(value).encode("utf-8", "replace"))

    def _add_array(self, value: Any) -> None:
        package = type(value).__module__
        on_ranks = package.startswith("torch.distributed")
        if package.partition(".")[0] not in _ARRAYS or on_ranks:
            raise _NotCompared
        if getattr(getattr(value, "device", "cpu"), "type", "cpu") != "cpu":
            raise _NotCompared  # a copy from the GPU would take long
        if getattr(value, "nbytes", 0) > _MOST_NBYTES:
            raise _NotCompared
        import numpy as np

        array = np.asarray(value.detach() if hasattr(value, "detach") else value)
        if array.dtype.hasobject or array.nbytes > _MOST_NBYTES:
            raise _NotCompared
        self._put(f"{type(value).__name__} {array.dtype} {array.shape}".encode())
        self._put(array.tobytes())

    def _put(self, content: bytes) -> None:
        self._nbytes += len(content)
        if self._nbytes > _MOST_NBYTES:
            raise _NotCompared
        self._hash.update(b"%d " % len(content))
        self._hash.update(content)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _sorted(items: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    # By the first of each, which may be of several types.
    found = list(items)
    keys = [key if type(key) is tuple else (key,) for key, *_ in found]
    if any(type(part) not in _PLAIN for key in keys for part in key):
        raise _NotCompared  # its repr() is code of the user's
    return sorted(found, key=lambda item: repr(item[0]))


FEATURE = VariableDescriptions
