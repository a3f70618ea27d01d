"""The result of a check of the doctor: fine, not installed, or wrong with a command that helps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

OK, ABSENT, WRONG = "ok", "absent", "wrong"
_MARKS = {OK: "ok   ", ABSENT: "–    ", WRONG: "wrong"}


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        about: what was checked.
        state: OK, ABSENT for something optional that is not installed, or WRONG.
        found: what was found.
        remedy: the command that helps; empty where nothing is wrong.
    """

    about: str
    state: str
    found: str
    remedy: str = ""


def lines_of(findings: Sequence[Finding]) -> str:
    """Returns a line for each finding."""
    width = max(len(one.about) for one in findings)
    lines = []
    for one in findings:
        # The output of a program may have several lines.
        found = " ".join(one.found.split()).rstrip(".")
        remedy = f". Type: {one.remedy}" if one.remedy else ""
        lines.append(f"{_MARKS[one.state]}  {one.about:<{width}}  {found}{remedy}")
    return "\n".join(lines)


def report(findings: Sequence[Finding]) -> str:
    """Returns a line for each finding, and one that counts the problems."""
    wrong = sum(one.state == WRONG for one in findings)
    end = (
        "No problems found." if not wrong else f"{wrong} of {len(findings)} checks found a problem."
    )
    return f"{lines_of(findings)}\n{end}"
