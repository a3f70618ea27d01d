"""The user's lines at which the main thread is."""

from __future__ import annotations

import os

from allranks.collectives.calls import guard
from allranks.engine.cell import CellRunner

_CALL = CellRunner._call.__code__
_DEEPEST = 300
_COLLECTIVES = f"{os.sep}collectives{os.sep}"

#: Lines of the user's code, the outermost first: of each its file, its number, and the name of its
#: function, which is empty for a cell's own lines.
Path = tuple[tuple[str, int, str], ...]


@guard.no_collection()
def users_lines() -> Path:
    """Returns the lines of the cell and of the user's functions that it has called.

    There are none within a collective, and where the main thread runs no cell.
    """
    frame = guard.frame_of_main_thread()
    found: list[tuple[str, int, str]] = []
    for _ in range(_DEEPEST):
        if frame is None or frame.f_code is _CALL:
            break
        code = frame.f_code
        kind = guard.kind_of(code.co_filename)
        if kind == guard.OURS and _COLLECTIVES in code.co_filename:
            return ()
        if kind == guard.USER:
            name = "" if code.co_name == "<module>" else code.co_name
            found.append((code.co_filename, frame.f_lineno or 0, name))
        frame = frame.f_back
    return tuple(reversed(found))
