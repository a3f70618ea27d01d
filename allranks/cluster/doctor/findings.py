"""One line for each thing that was looked at: it is well, it is not there, or what to type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

OK, ABSENT, WRONG = "ok", "absent", "wrong"
_MARKS = {OK: "ok   ", ABSENT: "–    ", WRONG: "wrong"}


class Finding(NamedTuple):
    """What was found of one thing.

    Attributes:
        about: what was looked at.
        state: OK, ABSENT for what is not there and need not be, or WRONG.
        found: what was found.
        remedy: what to type; empty where there is nothing to mend.
    """

    about: str
    state: str
    found: str
    remedy: str = ""


def text(findings: Iterable[Finding]) -> str:
    """Returns a line for each."""
    known = list(findings)
    width = max(len(one.about) for one in known)
    lines = []
    for one in known:
        # What a program has said may have several lines.
        found = " ".join(one.found.split()).rstrip(".")
        remedy = f". Type: {one.remedy}" if one.remedy else ""
        lines.append(f"{_MARKS[one.state]}  {one.about:<{width}}  {found}{remedy}")
    return "\n".join(lines)
