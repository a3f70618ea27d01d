"""Lines of the user's source: where a call was made, and their text in messages."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import threading
from contextlib import suppress
from functools import cache
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

from allranks.collectives.calls.frames import frame_of_main_thread, no_collection

_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")) + os.sep
#: How Cython names the files of mpi4py.
MPI4PY = "src/mpi4py/"
_LIBRARIES = (
    MPI4PY,
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
OURS, LIBRARY, USER = range(3)
_WIDTH = 100
_REMEMBERED = 4096
SITES: dict[int, tuple[Site, CodeType]] = {}
"""The user's lines by the address of their instruction. The code object is kept, so that the
address is not used again."""
CELLS: dict[str, str] = {}
"""The names of cells that people see, as ``In[3]``, by the file names of their code. Their sources
are in `linecache` under both."""


def shown_name(file: str) -> str:
    return CELLS.get(file, file)


def source_line(name: str, number: int) -> str:
    try:
        return linecache.getline(name, number).strip()
    except Exception:  # a cell has replaced functions of linecache
        return ""


class Site(NamedTuple):
    """One line of source."""

    filename: str
    lineno: int

    @classmethod
    def of(cls, place: str) -> Site | None:
        filename, _, lineno = place.rpartition(":")
        return cls(filename, int(lineno)) if lineno.isdigit() else None

    @property
    def place(self) -> str:
        """The line without its source, from which `with_source` finds it."""
        return f"{self.filename}:{self.lineno}"

    @property
    def source(self) -> str:
        return source_line(self.filename, self.lineno)

    @property
    def in_cell(self) -> str:
        return f"line {self.lineno}: {self.source}" if self.source else str(self)

    def __str__(self) -> str:
        source = self.source
        if len(source) > _WIDTH:
            source = source[: _WIDTH - 1] + "…"
        # A name short enough to be read in a message: relative to the working directory.
        name = self.filename
        with suppress(OSError):  # a cell may have removed that directory
            name = name.removeprefix(os.getcwd() + os.sep)
        where = f"{name}:{self.lineno}"
        return f"{where}: {source}" if source else where


_PLACE = re.compile(r"(?m)^((?:.* (?:at|in) )?)([^\n]+?:\d+)( \(\w+\))?$")
"""A `Site.place` in a text, and perhaps the kind of an exception after it."""


def with_source(text: str) -> str:
    """The text with the source of its lines, as this rank has it."""
    return _PLACE.sub(lambda found: f"{found[1]}{Site.of(found[2])}{found[3] or ''}", text)


@cache
def kind_of(name: str) -> int:
    """Whether a file of this name is `OURS`, of a `LIBRARY`, or the `USER`'s."""
    if name.startswith((_PACKAGE, "<frozen")):
        return OURS
    if name.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in name:
        return LIBRARY
    return USER


def of_frame(frame: FrameType | None) -> Site:
    """The innermost line of the user at or above ``frame``, or else that of a library."""
    user, library = _found(frame)
    return user or library or Site("<unknown>", 0)


def has_user_line(frame: FrameType | None) -> bool:
    return _found(frame)[0] is not None


def _found(frame: FrameType | None) -> tuple[Site | None, Site | None]:
    """The innermost line of the user, and the innermost line of a library below it."""
    library: Site | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        kind = kind_of(name)
        if kind == USER:
            return Site(shown_name(name), frame.f_lineno), library
        if kind == LIBRARY and library is None:
            library = Site(name, frame.f_lineno)
        frame = frame.f_back
    return None, library


def of_traceback(traceback: TracebackType | None) -> Site:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return of_frame(traceback.tb_frame if traceback is not None else None)


def find(frame: FrameType | None) -> Site:
    """The user's line at or above ``frame``; it is cached."""
    above = frame
    while above is not None:
        code = above.f_code
        at = id(code) + above.f_lasti
        if (known := SITES.get(at)) is not None:
            return known[0]
        kind = kind_of(code.co_filename)
        if kind == USER:
            if len(SITES) >= _REMEMBERED:
                SITES.clear()
            site = Site(shown_name(code.co_filename), above.f_lineno)
            SITES[at] = site, code
            return site
        if kind == LIBRARY:
            break  # not cached: the library's line may be reached from many lines of the user
        above = above.f_back
    user, library = _found(frame)
    if user is None and threading.current_thread() is not threading.main_thread():
        # Libraries call from their own threads, above which the user has no line: the line at
        # which the main thread waits is the next best.
        with no_collection():
            user, _ = _found(frame_of_main_thread())
    return user or library or Site("<unknown>", 0)
