"""What of a display a notebook can show: checked on the rank, as a notebook could only fail."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jupyter_client.jsonutil import json_default

#: All displays that stand in a cell, of one rank: some 50 figures, or a page with its own scripts.
MOST_NBYTES = 8 << 20
#: A parser of JSON gives up at some depth, and each has another one.
_DEEPEST = 100
_MOST_NOTES = 5
_MOST_NAME = 80


@dataclass(frozen=True)
class Bundle:
    """Mime types and their data, as JSON carries them, and what of it is not shown, in words."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    nbytes: int
    notes: list[str]


def checked(data: Any, metadata: Any, text_nbytes: int, get_it: str) -> Bundle:
    """Returns of a display what can be shown; where that is nothing, it says why.

    Args:
        data: by mime type, as a user's class may have returned it.
        metadata: beside it, as well.
        text_nbytes: a longer plain text is cut in its middle.
        get_it: how to have the whole of such a text.
    """
    good: dict[str, Any] = {}
    notes: list[str] = []
    nbytes = 0
    try:
        parts = dict(data)
    except Exception:
        parts = {}
        notes.append(f"a display is not shown: expected a dict, found {type(data).__name__}")
    for mime, value in parts.items():
        if mime == "text/plain" and isinstance(value, str):
            value = _cut(value, text_nbytes, get_it)
        try:
            good[mime], size = _part(mime, value)
            nbytes += len(mime) + size
        except _CannotBeShown as problem:
            name = mime[:_MOST_NAME] if isinstance(mime, str) else "a part of it"
            notes.append(f"{name} is not shown: {problem}")
    try:
        told, size = _as_json(metadata) if metadata else ({}, 0)
        nbytes += size
        if not isinstance(told, dict):
            raise _CannotBeShown(f"expected a dict, found {type(metadata).__name__}")
    except _CannotBeShown as problem:
        told = {}
        notes.append(f"metadata is left out: {problem}")
    if notes and not good:
        good, notes = {"text/plain": "\n".join(notes[:_MOST_NOTES])}, []
    return Bundle(good, told, nbytes, notes[:_MOST_NOTES])


class _CannotBeShown(Exception):
    """Why a part of a display cannot be shown."""


def _part(mime: Any, value: Any) -> tuple[Any, int]:
    """Returns the data of one mime type as JSON has it, and how many bytes it has.

    Raises:
        _CannotBeShown: a notebook would refuse it.
    """
    if not isinstance(mime, str):
        raise _CannotBeShown(f"expected a mime type, found {type(mime).__name__}")
    if mime.startswith("text/") and isinstance(value, bytes):
        raise _CannotBeShown("expected text, found bytes")
    if isinstance(value, str | bytes) and len(value) > MOST_NBYTES:
        raise _CannotBeShown(_too_large(len(value)))
    shown, nbytes = _as_json(value)
    if nbytes > MOST_NBYTES:
        raise _CannotBeShown(_too_large(nbytes))
    is_text = isinstance(shown, str) or (
        isinstance(shown, list) and all(isinstance(line, str) for line in shown)
    )
    if not is_text and not mime.endswith("json"):
        raise _CannotBeShown(f"expected text, found {type(value).__name__}")
    return "".join(shown) if is_text and not mime.endswith("json") else shown, nbytes


def _too_large(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB, and a cell shows {MOST_NBYTES / 1e6:.1f} MB of displays a rank"


def _as_json(value: Any) -> tuple[Any, int]:
    """Returns what JSON has of a value: bytes in base64, numpy's numbers as Python's.

    Raises:
        _CannotBeShown: JSON has nothing for it.
    """
    if type(value) is str:
        return value, len(value.encode("utf-8", "surrogatepass"))
    try:
        text = _write(value)
        shown = _read(text)
        if _is_deeper(shown, _DEEPEST):
            raise RecursionError
    except RecursionError:
        raise _CannotBeShown(f"expected at most {_DEEPEST} levels, found more") from None
    except Exception as error:
        raise _CannotBeShown(f"{str(error)[:200]}") from None
    return shown, len(text)


def _known(value: Any) -> Any:
    try:
        return json_default(value)
    except TypeError:  # its own text may have an address, and that each rank another one
        raise TypeError(f"JSON has nothing for {type(value).__name__}") from None


# Made here, because a cell may replace what json holds.
_write = json.JSONEncoder(default=_known, allow_nan=False).encode
_read = json.JSONDecoder().decode


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(one, levels - 1) for one in inside)


def _cut(text: str, most: int, get_it: str) -> str:
    """Returns a text, or its two ends around a line that counts the bytes left out."""
    if len(text) <= most:
        return text
    head, middle, tail = text[: most // 2], text[most // 2 : -(most // 2)], text[-(most // 2) :]
    nbytes = len(middle.encode("utf-8", "surrogatepass"))
    return f"{head}\n… {nbytes:,} bytes are not shown: {get_it} …\n{tail}"
