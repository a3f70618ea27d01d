"""Describes the variables of a rank, for the notebook to compare them with those of others."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from allranks.engine.features import Answered, RankContext, RankFeature

REQUEST = "variables"
#: Values of more bytes, or more parts, are not compared, nor those after this time.
_MOST_NBYTES, _MOST_PARTS, _SECONDS = 4 << 20, 1000, 0.2
_TEXT_LENGTH = 80
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

    def _is_users(self, name: str) -> bool:
        value = self._names[name]
        own = value is not self._given.get(name, self)
        return own and name[0] != "_" and name not in ("In", "Out") and not isinstance(value, _CODE)


def describe(value: object, late: float) -> tuple[str, str, str]:
    """Returns the kind, a text and a digest of a value; the last two may be empty."""
    kind = type(value).__name__
    if isinstance(value, _PLAIN) or _is_plain(value):
        text = repr(value)
        return kind, text[:_TEXT_LENGTH], _digest(text.encode("utf-8", "replace"))
    # Arrays of any library. repr() of other objects may take long or have side effects.
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = f"{kind} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        return kind, "", "" if time.monotonic() > late else _digest_of_array(value)
    return kind, "", ""


def _is_plain(value: object) -> bool:
    """Whether the value consists of a few numbers and texts, so that its repr() is quick."""
    if type(value) not in (list, tuple, dict):
        return False
    for count, part in enumerate(_parts(value)):
        if count == _MOST_PARTS or type(part) not in _PLAIN:
            return False
    return True


def _parts(value: object) -> Iterator[object]:
    if type(value) in (list, tuple):
        for part in value:  # type: ignore[attr-defined]
            yield from _parts(part) if type(part) in (list, tuple, dict) else (part,)
    elif isinstance(value, Mapping):
        yield from value
        yield from _parts([*value.values()])


def _digest_of_array(value: Any) -> str:
    try:
        if getattr(getattr(value, "device", "cpu"), "type", "cpu") != "cpu":
            return ""  # a copy from the GPU would take long
        import numpy as np

        array = np.asarray(value.detach() if hasattr(value, "detach") else value)
        if array.dtype == object or array.nbytes > _MOST_NBYTES:
            return ""
        return _digest(array.tobytes())
    except Exception:
        return ""


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


FEATURE = VariableDescriptions
