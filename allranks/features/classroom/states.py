"""The only reader of what notebooks and the service of a class send: it returns clean values, or
refuses.

A student's notebook sends lines of JSON: its state, as a dictionary, and if the teacher has asked
for it the panel, as one text on a line of its own. The teacher's notebook first sends whether it
admits the student's. So a state is short, and a long line is no more
than a text. A field of another type, or that is out of its range, gets its default. A text has one
line of printable characters: no escape code for a terminal, no change of the direction of text, no
half of a character. Only the states of ranks have several lines, and a panel is a page for a frame
that runs no script.
"""

from __future__ import annotations

import json
from typing import Any

#: A longer line ends its connection.
STATE_NBYTES, PANEL_NBYTES = 50_000, 4_000_000
MAX_STUDENTS = 500
#: Of one account, or of one user of a hub.
MAX_NOTEBOOKS = 4
_LENGTHS = {
    "user": 60,
    "notebook": 300,
    "exercise": 40,
    "solved": 80,
    "state": 20,
    "error": 300,
    "waits": 300,
}
_NAME_LENGTH, _KEY_LENGTH, _RANKS_LENGTH = 60, 300, 5000
_MAX_NUMBER = 10**9


class RefusedMessage(ValueError):
    """A message is too long, or is none of the class."""


def one_line(text: object, length: int = _NAME_LENGTH) -> str:
    """Returns a text with printable characters only, and one space in place of all others."""
    return " ".join(_printable(text, length).split())


def _printable(text: object, length: int, keep: str = "") -> str:
    found = text[:length] if isinstance(text, str) else ""
    return "".join(one if one.isprintable() or one in keep else " " for one in found)


def _number(value: object) -> float:
    # A comparison with NaN is false, and one with an integer of 400 digits does not convert it.
    fits = isinstance(value, int | float) and 0 <= value <= _MAX_NUMBER
    return value if fits else 0  # type: ignore[return-value]


def clean(message: object) -> dict[str, Any]:
    """Returns the known fields of a state, each with a value of its type."""
    if not isinstance(message, dict):
        raise RefusedMessage("expected a state")
    found: dict[str, Any] = {
        name: one_line(message[name], length)
        for name, length in _LENGTHS.items()
        if name in message
    }
    if "ranks" in message:
        found["ranks"] = _printable(message["ranks"], _RANKS_LENGTH, "\n")
    if "cell" in message:
        found["cell"] = int(_number(message["cell"]))
    if "seconds" in message:
        found["seconds"] = float(_number(message["seconds"]))
    if "shows_panel" in message:
        found["shows_panel"] = message["shows_panel"] is True
    return found


def read_state(line: bytes) -> dict[str, Any]:
    """Returns the clean fields of a line with a state."""
    if len(line) > STATE_NBYTES:
        raise RefusedMessage("too long a state")
    return clean(_load(line))


def read_admission(line: bytes) -> str:
    """Returns why the teacher's notebook refuses a student's, "" if it admits it."""
    found = _load(line)
    if not isinstance(found, dict):
        raise RefusedMessage("expected an answer of a class")
    return one_line(found.get("refused"), _LENGTHS["error"])


def read_panel(line: bytes) -> str:
    """Returns the text of a line with a panel."""
    # A text in JSON takes no more memory than its line; a list could take twenty times as much.
    if len(line) > PANEL_NBYTES or not line.startswith(b'"'):
        raise RefusedMessage("expected a panel")
    found = _load(line)
    if not isinstance(found, str):
        raise RefusedMessage("expected a panel")
    return found.encode("utf-8", "replace").decode()


def read_class(answer: object) -> tuple[list[dict[str, Any]], str | None]:
    """Returns the students in an answer of the hub's service, and the panel that is open."""
    found = answer.get("students") if isinstance(answer, dict) else None
    if not isinstance(answer, dict) or not isinstance(found, list):
        raise RefusedMessage("expected the students of a class")
    students = []
    for one in found[:MAX_STUDENTS]:
        if not isinstance(one, dict):
            raise RefusedMessage("expected a student")
        students.append(
            {
                "key": one_line(one.get("key"), _KEY_LENGTH),
                "user": one_line(one.get("user")),
                "seconds_ago": float(_number(one.get("seconds_ago"))),
                "gone": one.get("gone") is True,
                "state": clean(one.get("state")),
            }
        )
    panel = answer.get("panel")
    if not isinstance(panel, str):
        return students, None
    return students, panel[:PANEL_NBYTES].encode("utf-8", "replace").decode()


def _load(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise RefusedMessage("expected JSON") from None
