"""Where in the user's source a call was made."""

from __future__ import annotations

import linecache
import os
import sysconfig
import threading
from contextlib import suppress
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

from allranks.collectives.calls import frames

_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")) + os.sep
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
OURS, LIBRARY, USER = range(3)
_kinds: dict[str, int] = {}
_WIDTH = 100
_REMEMBERED = 4096
SITES: dict[int, tuple[Site, CodeType]] = {}
"""The user's lines by the address of their instruction, which lies within its code object: that is
kept, so that nothing else comes to lie there."""


class Site(NamedTuple):
    """One line of source."""

    filename: str
    lineno: int

    def __str__(self) -> str:
        source = linecache.getline(self.filename, self.lineno).strip()
        if len(source) > _WIDTH:
            source = source[: _WIDTH - 1] + "…"
        # A name short enough to be read in a message: relative to the working directory.
        name = self.filename
        with suppress(OSError):  # a cell may have removed that directory
            name = name.removeprefix(os.getcwd() + os.sep)
        where = f"{name}:{self.lineno}"
        return f"{where}: {source}" if source else where


def kind_of(name: str) -> int:
    """Whose a file of source is, by its name."""
    known = _kinds.get(name)
    if known is not None:
        return known
    if name.startswith(_PACKAGE) or name.startswith("<frozen"):
        kind = OURS
    elif name.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in name:
        kind = LIBRARY
    else:
        kind = USER
    _kinds[name] = kind
    return kind


def of_frame(frame: FrameType | None) -> Site:
    """The innermost line at or above ``frame`` that is the user's own.

    A line inside a library (Keras calls us from deep within ``fit``) counts only where there is
    no line of the user's above it.
    """
    user, library = _found(frame)
    return user or library or Site("<unknown>", 0)


def _found(frame: FrameType | None) -> tuple[Site | None, Site | None]:
    """The innermost line of the user's, and the innermost of a library's that comes before it."""
    library: Site | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        kind = kind_of(name)
        if kind == USER:
            return Site(name, frame.f_lineno), library
        if kind == LIBRARY and library is None:
            library = Site(name, frame.f_lineno)
        frame = frame.f_back
    return None, library


def of_traceback(traceback: TracebackType | None) -> Site:
    """The user's own line where an exception was raised, or that led there."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return of_frame(traceback.tb_frame if traceback is not None else None)


def find(frame: FrameType | None) -> Site:
    """The user's line at or above ``frame``, which is remembered.

    TensorFlow calls us from threads of its own, which no line of the user's has started: then it
    is the line at which the main thread waits.
    """
    above = frame
    while above is not None:
        code = above.f_code
        at = id(code) + above.f_lasti
        known = SITES.get(at)
        if known is not None:
            return known[0]
        kind = kind_of(code.co_filename)
        if kind == USER:
            if len(SITES) >= _REMEMBERED:
                SITES.clear()
            site = Site(code.co_filename, above.f_lineno)
            SITES[at] = site, code
            return site
        if kind == LIBRARY:
            break
        above = above.f_back
    user, library = _found(frame)
    if user is None and threading.current_thread() is not threading.main_thread():
        user, _ = _found(frames.of_main_thread())
    return user or library or Site("<unknown>", 0)
