"""IPython's rich output on a rank: checked, then placed in the transcript, in order with the text.

Checked on the rank, because a notebook could only fail to show it.
"""

from __future__ import annotations

import json
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.jsonutil import json_default

from allranks.engine.transcript import DISPLAYS_NBYTES, Transcript

#: The depth at which parsers of JSON fail differs between them.
_DEEPEST = 100
_MOST_NOTES = 5
_MOST_NAME = 80

_WHOLE_VALUE = "%%distributed -o NAME returns the whole value, print() writes it to the log"
_WHOLE_TEXT = "print() writes the whole text to the log"


class _InTranscript:
    """Places what a cell displays in the transcript."""

    def __init__(self, shell: InteractiveShell, transcript: Transcript) -> None:
        super().__init__(shell=shell, parent=shell)  # type: ignore[call-arg]
        self.transcript = transcript

    def set_parent(self, parent: dict[str, Any]) -> None:
        # ipykernel names the message that is answered, which is never a cell.
        ...


class RankDisplayHook(_InTranscript, DisplayHook):
    """Shows the value of a cell's last expression."""

    def write_output_prompt(self) -> None:
        # The view labels the value with its rank, not with ``Out[n]:``.
        ...

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        _place(self.transcript, "result", format_dict, md_dict)

    def finish_displayhook(self) -> None:
        self._is_active = False


class RankDisplayPublisher(_InTranscript, DisplayPublisher):
    """Publishes ``display(…)``, its updates, and ``clear_output``."""

    def publish(  # type: ignore[override]
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        name = (transient or {}).get("display_id")
        kind = "update" if update else "display"
        _place(self.transcript, kind, data, metadata, None if name is None else str(name))

    def clear_output(self, wait: bool = False) -> None:
        self.transcript.place(["clear", bool(wait)])


def _place(transcript: Transcript, kind: str, data: Any, metadata: Any, *name: str | None) -> None:
    """Places the parts of a display that can be shown, or the reasons if there are none.

    ``data`` may be anything: a user's class returns it. A long plain text is cut in its middle,
    where a line names the way to the whole of it.
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
            get_it = _WHOLE_VALUE if kind == "result" else _WHOLE_TEXT
            value = _cut(value, transcript.limit_nbytes, get_it)
        try:
            good[mime], size = _part(mime, value)
            nbytes += len(mime) + size
        except _CannotBeShown as problem:
            about = mime[:_MOST_NAME] if isinstance(mime, str) else "a part of it"
            notes.append(f"{about} is not shown: {problem}")
    try:
        shown, size = _as_json(metadata) if metadata else ({}, 0)
        nbytes += size
        if not isinstance(shown, dict):
            raise _CannotBeShown(f"expected a dict, found {type(metadata).__name__}")
    except _CannotBeShown as problem:
        shown = {}
        notes.append(f"metadata is left out: {problem}")
    if notes and not good:
        good, notes = {"text/plain": "\n".join(notes[:_MOST_NOTES])}, []
    if good or kind == "update":
        transcript.place([kind, good, shown, *name], nbytes)
    for note in notes[:_MOST_NOTES]:
        transcript.note(note)


class _CannotBeShown(Exception):
    """Why a part of a display cannot be shown."""


def _part(mime: Any, value: Any) -> tuple[Any, int]:
    """Returns the data of one mime type as JSON has it, and its size; raises if a notebook
    would refuse it.
    """
    if not isinstance(mime, str):
        raise _CannotBeShown(f"expected a mime type, found {type(mime).__name__}")
    if mime.startswith("text/") and isinstance(value, bytes):
        raise _CannotBeShown("expected text, found bytes")
    if isinstance(value, str | bytes) and len(value) > DISPLAYS_NBYTES:
        raise _CannotBeShown(_too_large(len(value)))
    shown, nbytes = _as_json(value)
    if nbytes > DISPLAYS_NBYTES:
        raise _CannotBeShown(_too_large(nbytes))
    is_text = isinstance(shown, str) or (
        isinstance(shown, list) and all(isinstance(line, str) for line in shown)
    )
    if not is_text and not mime.endswith("json"):
        raise _CannotBeShown(f"expected text, found {type(value).__name__}")
    return "".join(shown) if is_text and not mime.endswith("json") else shown, nbytes


def _too_large(nbytes: int) -> str:
    return (
        f"{nbytes / 1e6:.1f} MB, and a cell shows {DISPLAYS_NBYTES / 1e6:.1f} MB of displays a rank"
    )


def _as_json(value: Any) -> tuple[Any, int]:
    """Returns a value as JSON has it, and its size: bytes in base64, numpy's numbers as
    Python's.
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
    except TypeError:  # not the value's own text, which may have an address that differs by rank
        raise TypeError(f"JSON has nothing for {type(value).__name__}") from None


# Made here, because a cell may replace attributes of json.
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
