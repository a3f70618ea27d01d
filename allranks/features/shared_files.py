"""Magics that write files: on a host, one rank after the other.

All ranks run the same cell, so they would write the same file at once, and one would read what
another has half written.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic_arguments import parse_argstring
from IPython.core.magics.osm import OSMagics

from allranks.engine.features import RankContext, RankFeature
from allranks.engine.shell_magics import replace_magic
from allranks.post_import import PostImportHook

_CYTHON = "Cython.Build.IpythonMagic"
_COMPILING = "cython", "cython_inline", "cython_pyximport"
#: The files that this rank has locked.
_held: list[int] = []


_WRITEFILE = OSMagics.writefile


def take_turns(shell: InteractiveShell, folder: str) -> None:
    """Has ``%%writefile`` and ``%%cython`` wait for the other ranks of this cluster on this host.

    ``folder`` has the file that they lock; a rank that dies unlocks it.
    """
    lock = os.path.join(folder, "magics")

    def cython(module: Any) -> None:
        # All ranks compile the same library, and the first one is enough.
        for name in _COMPILING:
            if (magic := getattr(module.CythonMagics, name, None)) is not None:
                setattr(module.CythonMagics, name, _in_turn(magic, lock))
        if hasattr(module, "load_dynamic"):
            module.load_dynamic = _unlocked(module.load_dynamic)

    PostImportHook([_CYTHON], cython).install()
    turns = _in_turn(_unless_written(_WRITEFILE), lock)
    replace_magic(shell, OSMagics, "writefile", "writefile", turns)


def _in_turn(magic: Callable[..., Any], lock: str) -> Callable[..., Any]:
    @wraps(magic)
    def waiting(*arguments: Any, **options: Any) -> Any:
        with _locked(lock):
            return magic(*arguments, **options)

    return waiting


@contextmanager
def _locked(path: str) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # there is no room for a file
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # an interrupt ends this wait
        _held.append(descriptor)
        yield
    finally:
        _held.clear()
        os.close(descriptor)


def _unlocked(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def loading(*arguments: Any) -> Any:
        # The code of the library may wait for the other ranks, in a collective.
        for descriptor in _held:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        found = load(*arguments)
        for descriptor in _held:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return found

    return loading


def _unless_written(magic: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(magic)
    def writefile(magics: OSMagics, line: str, cell: str) -> None:
        arguments = parse_argstring(magic, line)
        file = Path(os.path.expanduser(arguments.filename.strip("\"'")))
        with suppress(OSError, ValueError):
            # Another rank may import it by now.
            if not arguments.append and file.is_file() and file.read_bytes() == cell.encode():
                print(f"Overwriting {file}")
                return
        magic(magics, line, cell)

    return writefile


class SharedFiles(RankFeature):
    """Has the ranks of a host write files in turns."""

    def started(self, rank: RankContext) -> None:
        take_turns(rank.shell, rank.config.session_dir)


FEATURE = SharedFiles
