"""What every thread of this process is doing."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_COLLECTS_WHILE_LOCKED = sys.version_info < (3, 11, 9)
_alone = threading.RLock()


def of_threads() -> dict[int, FrameType]:
    """The innermost frame of every thread, by the thread's identifier.

    Before 3.11.9 CPython holds a lock while it makes the frames. A garbage collection that frees a
    ``threading.local`` just then waits for that lock for ever, and with it the whole process
    (https://github.com/python/cpython/issues/106883): so none begins here.
    """
    if not _COLLECTS_WHILE_LOCKED:
        return sys._current_frames()
    with _alone:
        collects = gc.isenabled()
        try:
            gc.disable()
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def of_main_thread() -> FrameType | None:
    """The innermost frame of the thread that runs the cells."""
    return of_threads().get(threading.main_thread().ident or 0)
