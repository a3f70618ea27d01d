"""Describes the variables of a rank, for the notebook to compare them with those of others."""

from __future__ import annotations

import hashlib
import time
from itertools import chain
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


def describe(value: object, late: float) -> tuple[str, str, str]:
    """Returns the kind, a text and a digest of a value; the last two may be empty."""
    kind = type(value).__name__[:_TEXT_LENGTH]
    in_time = time.monotonic() < late
    try:
        if in_time and _is_plain(value):
            text = repr(value)
            return kind, text[:_TEXT_LENGTH], _digest(text.encode("utf-8", "replace"))
        # Arrays of any library. repr() of other objects may take long or have side effects.
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            dtype = str(value.dtype).removeprefix("torch.")[:_TEXT_LENGTH]
            kind = f"{kind} {dtype} {tuple(value.shape)}"
            return kind, "", _digest_of_array(value) if in_time else ""
    except Exception:
        pass  # code of the user's, such as __repr__
    return kind, "", ""


def _is_plain(value: object) -> bool:
    """Whether the value consists of a few numbers and texts, so that its repr() is quick."""
    parts, length = [value], 0
    for _ in range(_MOST_PARTS):
        if not parts:
            return True
        part = parts.pop()
        if isinstance(part, str | bytes):
            length += len(part)
        if type(part) is dict:
            parts += chain(part, part.values()) if len(part) < _MOST_PARTS else [object()]
        elif type(part) in (list, tuple):
            parts += part if len(part) < _MOST_PARTS else [object()]  # type: ignore[arg-type]
        elif not isinstance(part, _PLAIN) or length > _MOST_NBYTES or _is_long(part):
            return False
    return False


def _is_long(part: object) -> bool:
    return isinstance(part, int) and part.bit_length() > _MOST_BITS


def _digest_of_array(value: Any) -> str:
    package = type(value).__module__
    on_ranks = package.startswith("torch.distributed")
    if package.partition(".")[0] not in _ARRAYS or on_ranks:
        return ""
    if getattr(getattr(value, "device", "cpu"), "type", "cpu") != "cpu":
        return ""  # a copy from the GPU would take long
    if getattr(value, "nbytes", 0) > _MOST_NBYTES:
        return ""
    import numpy as np

    array = np.asarray(value.detach() if hasattr(value, "detach") else value)
    if array.dtype.hasobject or array.nbytes > _MOST_NBYTES:
        return ""
    return _digest(array.tobytes())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


FEATURE = VariableDescriptions
