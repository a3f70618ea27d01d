"""Limits the output of a notebook that is graded: text, displays, widgets and errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

_MESSAGE_NBYTES = 200
"""What each output needs beside its content, so that many empty ones are limited too."""
_FULL_CELLS = 20
"""A notebook keeps as much as this number of cells may have."""


class OutputLimit:
    """The output that a notebook has kept so far; ``most`` is the bytes that one cell may have."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: Counter[tuple[int, str]] = Counter()
        self._errors: set[int] = set()

    def keeps(self, cell: int, message: dict[str, Any]) -> bool:
        """Returns whether a message of the kernel is kept; cuts a long error."""
        kind, content = message["msg_type"], message["content"]
        if kind in ("status", "execute_input"):
            return True
        if kind == "error":
            self.cut(content)
        # The front end of a widget may be large, and must not displace what the cell shows.
        key = cell, "widgets" if kind.startswith("comm") else ""
        nbytes = nbytes_of(content) + sum(
            memoryview(each).nbytes for each in message.get("buffers", ())
        )
        if kind == "error" and cell not in self._errors:
            self._errors.add(cell)  # without any, the cell would count as one that did not fail
        elif self._kept[key] + nbytes > self._most or (
            self._kept.total() + nbytes > _FULL_CELLS * self._most
        ):
            self._kept[key] = self._most  # what follows does not appear without what came before
            return False
        self._kept[key] += nbytes
        return True

    def cut(self, error: dict[str, Any]) -> None:
        """Cuts the texts of an error."""
        lines = error["traceback"]
        if nbytes_of(lines) > self._most:
            error["traceback"] = ["\n".join(lines)[: self._most] + " …"]
        for name in ("ename", "evalue"):
            if len(error[name]) > self._most:
                error[name] = error[name][: self._most] + " …"


def nbytes_of(content: Any) -> int:
    """Returns about how many bytes the content of a message needs in a notebook."""
    # Not by a recursion: a message may be nested deeply.
    nbytes, left = _MESSAGE_NBYTES, [content]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one
        nbytes += len(one) if isinstance(one, str) else 1
    return nbytes
