"""How much of the disk a rank's log takes, and whether there is room for more.

Processes that a cell has started write to the log by descriptors of their own, so it stays the
same file, and every byte keeps its offset: what is old is cut out of it, which leaves a hole.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

_BLOCK_NBYTES = 4096
# linux/falloc.h
_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_libc = ctypes.CDLL(None, use_errno=True)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class LogRoom:
    """Holds one log to a size.

    Args:
        path: the log, which is there.
        limit_nbytes: what it may take; half of it stays when it is cut.
    """

    def __init__(self, path: str, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        # Not for appending: that would write the note at the end.
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._gone = 0

    def cut(self, end: int) -> bool:
        """Cuts the oldest part out where the log, ``end`` bytes long, takes too much.

        Returns:
            Whether something is gone.
        """
        if end - self._gone <= self.limit_nbytes:
            return False
        upto = (end - self.limit_nbytes // 2) // _BLOCK_NBYTES * _BLOCK_NBYTES
        if _allocate(self.file, _PUNCH_HOLE | _KEEP_SIZE, 0, upto):
            # This file system has no holes on demand: nothing stays, and the offsets do.
            upto = end
            os.ftruncate(self.file, 0)
            os.ftruncate(self.file, end)
        self._gone = upto
        os.pwrite(self.file, self._note().encode(), 0)
        return True

    def _note(self) -> str:
        return (
            f"allranks: this log has reached {as_text(self.limit_nbytes)} (ALLRANKS_LOG_LIMIT), "
            f"and its first {self._gone:,} bytes were removed. To read the rest: "
            f"tail -c +{self._gone + 1}\n"
        )

    def is_full(self) -> bool:
        """Whether nothing can be appended, for want of room or of the user's share of it."""
        end = os.fstat(self.file).st_size
        # Takes the next block, where that is not taken yet, and leaves the size.
        problem = _allocate(self.file, _KEEP_SIZE, end, 1)
        if problem in (0, errno.EBADF):  # who closed it is told otherwise
            return False
        return problem in _NO_ROOM or os.fstatvfs(self.file).f_bavail == 0


def as_text(nbytes: int) -> str:
    """Returns a size as ``1 GB``."""
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes:,} bytes"


def _allocate(file: int, mode: int, start: int, nbytes: int) -> int:
    """Calls Linux's fallocate; returns 0, or the number of the error."""
    if sys.platform != "linux":
        return errno.EOPNOTSUPP
    failed = _libc.fallocate64(file, mode, ctypes.c_int64(start), ctypes.c_int64(nbytes))
    return ctypes.get_errno() if failed else 0
