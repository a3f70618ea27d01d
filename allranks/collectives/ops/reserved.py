"""Memory for what is longer than a receiver expects.

Open MPI writes a message that is longer than its buffer as a whole, also behind the buffer, before
it raises MPI_ERR_TRUNCATE. So a receive that is posted before its message is known goes to the
buffer and, from there on, to reserved memory.
"""

from __future__ import annotations

import mmap as memory_maps
from contextlib import suppress
from functools import cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

from mpi4py import MPI

from allranks.collectives.ops.buffers import layout_of

_RESERVES_NO_SWAP: int = getattr(memory_maps, "MAP_NORESERVE", 0)
_SMALL_PAGES: int | None = getattr(memory_maps, "MADV_NOHUGEPAGE", None)
"""Linux would clear 2 MB for the first byte."""
_UNUSED: int | None = getattr(memory_maps, "MADV_DONTNEED", None)
_NBYTES = (1 << 31) - 1
"""The longest message: MPI counts its bytes in 31 bits. Memory is used as far as it fills."""
_LIMITED_NBYTES = 32 << 20
"""The same where the system lets a process reserve no more."""
_DLPACK_CPU = 1
WRITES_BEHIND: bool = "Open MPI" in MPI.Get_library_version()


def reserve() -> mmap:
    """Returns memory for a message of any length."""
    kept = MAP_PRIVATE | MAP_ANONYMOUS | _RESERVES_NO_SWAP
    try:
        found = mmap(-1, _NBYTES, flags=kept)
    except OSError:  # a limit of memory counts what is reserved
        found = mmap(-1, _LIMITED_NBYTES, flags=kept)
    if _SMALL_PAGES is not None:
        with suppress(OSError):  # a kernel without large pages
            found.madvise(_SMALL_PAGES)
    return found


@cache
def _behind() -> tuple[mmap, int]:
    """The memory that all receives share, and its address. Its content is never read."""
    memory = reserve()
    return memory, MPI.Get_address(memory)


def drop_rest() -> None:
    """Returns the memory that a message has filled to the system."""
    if _UNUSED is not None:
        _behind()[0].madvise(_UNUSED)


def _is_on_host(data: Any) -> bool:
    try:
        memoryview(data)
    except (TypeError, ValueError, BufferError):
        device = getattr(data, "__dlpack_device__", None)
        return device is not None and device()[0] == _DLPACK_CPU
    return True


def extended(buf: Any) -> tuple[list[Any], int] | None:
    """Returns a buffer that continues in reserved memory, and the bytes up to there; None where
    MPI writes nothing behind a buffer, or where its layout is not known.

    The last item of the buffer is a datatype, which the caller frees.
    """
    if not WRITES_BEHIND or (layout := layout_of(buf)) is None:
        return None
    data, start, count, kind = layout
    if not _is_on_host(data):
        return None
    room = count * kind.Get_size()
    memory, address = _behind()
    rest = min(_NBYTES - room, len(memory))
    if rest < 1:
        return None
    # Relative to the buffer, so that mpi4py checks and keeps it.
    distance = address - MPI.Get_address(data)
    both = MPI.Datatype.Create_struct([count, rest], [start, distance], [kind, MPI.BYTE])
    return [data, 1, both.Commit()], room
