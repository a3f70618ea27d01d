"""The frames of this process's threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_COLLECTS_IN_ALLOCATIONS = sys.version_info < (3, 12)
_collection_lock = threading.RLock()


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection begins within, so that frames of other threads can be walked.

    Before 3.12 CPython collects while it makes a frame object. The collection may let the other
    thread run, so that what ``f_back`` returns is no frame any more. Before 3.11.9 it may also wait
    for a lock that `sys._current_frames` holds, and with it the whole process
    (https://github.com/python/cpython/issues/106883).
    """
    if not _COLLECTS_IN_ALLOCATIONS:
        yield
        return
    with _collection_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def frames_of_threads() -> dict[int, FrameType]:
    with no_collection():
        return sys._current_frames()


def frame_of_main_thread() -> FrameType | None:
    return frames_of_threads().get(threading.main_thread().ident or 0)
