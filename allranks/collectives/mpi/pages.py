"""A page of the board as it crosses the network: no line of source does.

Every rank has the source that it runs: where a page tells of a line, the receiver looks it up.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from allranks.collectives.calls.board import TEXTS_OF_LINES, text_of, with_text
from allranks.collectives.calls.callsite import Site

_WITH_SOURCE = re.compile(r"(?m)(:\d+): .*?( \(\w+\))?$")
"""A place with its line, and perhaps the kind of an exception after it."""
_PLACE = re.compile(r"(?m)^((?:.* (?:at|in) )?)([^\n]+?):(\d+)( \(\w+\))?$")


def without_source(text: str) -> str:
    """What a rank tells, its lines by file and number only."""
    return _WITH_SOURCE.sub(r"\1\2", text)


def with_source(text: str) -> str:
    """The same, with the lines as this rank knows them."""

    def whole(found: re.Match[str]) -> str:
        before, file, number, after = found.groups(default="")
        return f"{before}{Site(file, int(number))}{after}"

    return _PLACE.sub(whole, text)


def carried(page: bytes) -> bytes:
    """A page as it is sent."""
    return _changed(page, without_source)


def shown(page: bytes) -> bytes:
    """A page as it is shown where it has come."""
    return _changed(page, with_source)


def _changed(page: bytes, change: Callable[[str], str]) -> bytes:
    for kind in TEXTS_OF_LINES:
        before = text_of(page, kind)
        after = change(before)
        if after != before:
            page = with_text(page, kind, after)
    return page
