"""Where the results of members lie until somebody asks for them: outside the notebook's memory.

A rank leaves a large result in shared memory. From there it is copied, by the system alone, into
memory that belongs to neither the rank nor the notebook: it outlives a rank that dies, and is given
back with the last object that refers to it, however this process ends.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import Any, Protocol

from allranks.records.packing import unpack

_OURS = "/memfd:allranks"


class Arena:
    """A file without a name, that grows with what is put into it."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("allranks-results")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        self._end = 0
        weakref.finalize(self, os.close, self.fd)

    def put(self, packed: bytes | Shared) -> InArena:
        """Returns where a packed result lies now."""
        os.lseek(self.fd, self._end, os.SEEK_SET)
        write(self.fd, packed)
        nbytes = len(packed)
        place = InArena(self, self._end, nbytes)
        self._end += nbytes
        return place


class Place(Protocol):
    """Where a packed result lies."""

    nbytes: int

    def load(self) -> Any:
        """Returns the result, a fresh copy."""


class InArena:
    """A result in an arena, which it keeps alive."""

    def __init__(self, arena: Arena, start: int, nbytes: int) -> None:
        self._arena, self._start, self.nbytes = arena, start, nbytes

    def load(self) -> Any:
        """Returns the result, a fresh copy."""
        return _load(self._arena.fd, self._start, self.nbytes)


class InFile:
    """A result in a file of a store.

    Args:
        path: the file.
        start: where the result begins in it, in bytes.
        nbytes: how long it is.
        trusted: whether it is unpickled whoever has written it.
    """

    def __init__(self, path: Path, start: int, nbytes: int, trusted: bool = False) -> None:
        self._path, self._start, self.nbytes, self._trusted = path, start, nbytes, trusted

    def load(self) -> Any:
        """Returns the result, a fresh copy.

        Raises:
            OSError: the file is gone, or another user's by now.
        """
        with self._path.open("rb") as file:
            if not self._trusted and is_foreign(os.fstat(file.fileno())):
                raise PermissionError(f"{self._path} is another user's by now: not unpickled")
            return _load(file.fileno(), self._start, self.nbytes)


def is_foreign(file: os.stat_result) -> bool:
    """Whether a file is another user's, who could have put code into a pickle; root's is not."""
    return file.st_uid not in (os.getuid(), 0)


class Shared:
    """Shared memory that a rank of this host has left a packed result in.

    Args:
        address: where it can be opened.
        nbytes: how much of it is meant.

    Raises:
        OSError: it cannot be opened from here.
    """

    def __init__(self, address: str, nbytes: int) -> None:
        # In a container of its own, a rank's process id may be another process's here.
        if not os.readlink(address).startswith(_OURS):
            raise OSError(f"{address} is no shared memory of a rank")
        self.fd = os.open(address, os.O_RDONLY | os.O_CLOEXEC)
        self._nbytes = nbytes
        weakref.finalize(self, os.close, self.fd)

    def __len__(self) -> int:
        return self._nbytes


def write(fd: int, packed: bytes | Shared) -> None:
    """Writes a packed result where a file stands."""
    if isinstance(packed, Shared):
        sent = 0
        while sent < len(packed):
            more = os.sendfile(fd, packed.fd, sent, len(packed) - sent)
            if not more:
                raise OSError("the shared memory of a rank has been cut short")
            sent += more
        return
    rest = memoryview(packed)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _load(fd: int, start: int, nbytes: int) -> Any:
    packed = bytearray(nbytes)
    at = 0
    while at < nbytes:
        more = os.preadv(fd, [memoryview(packed)[at:]], start + at)
        if not more:
            raise OSError("a result has been cut short")
        at += more
    return unpack(packed)
