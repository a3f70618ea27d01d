"""The tables of docs/horovod.md: every name of Horovod 0.28, and the modes in which it is tried."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

EAGER, FUNCTION, SESSION = "eager", "tf.function", "session"
_PAGE = Path(__file__).parents[2] / "docs" / "horovod.md"
# The text below the heading of a module, up to the next heading.
_MODULE = re.compile(r"^### (horovod\S*)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| (`.+) \| (works|differs|not here) \| (.+?) \| (.*)\|$", re.MULTILINE)


class Row(NamedTuple):
    """A row of a table: names with the same properties.

    Attributes:
        names: the names of Horovod.
        here: ``works``, ``differs`` or ``not here``.
        tried: the modes in which `names_suite` tests each name; empty for missing names.
        note: the differences from Horovod, or an alternative; may be empty.
    """

    names: list[str]
    here: str
    tried: list[str]
    note: str


def _read(table: str) -> list[Row]:
    return [
        Row(
            re.findall(r"`(\w+)`", names),
            here,
            [mode.strip("`") for mode in tried.split(", ") if mode != "–"],
            note.strip(),
        )
        for names, here, tried, note in _ROW.findall(table)
    ]


MODULES = {module: _read(table) for module, table in _MODULE.findall(_PAGE.read_text())}
