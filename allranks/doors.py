"""Accepts a connection, also if this process has no descriptor left. Standard library only.

A connection that cannot be accepted stays in the queue, and a selector reports it again at once:
a thread that only ignored the error would use a whole core until a descriptor is free. So one
descriptor is kept in reserve. It is given up for the connection, which is closed at once.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from contextlib import suppress

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class _Reserve:
    """One descriptor that is open for the case that no other one is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = -1
        self.take()

    def take(self) -> None:
        """Takes a descriptor, if there is none in reserve and one is free."""
        with self._lock, suppress(OSError):
            if self._descriptor < 0:
                self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def refuse(self, listener: socket.socket) -> None:
        """Closes the next connection."""
        with self._lock:
            if self._descriptor < 0:  # another thread has taken it before
                return
            os.close(self._descriptor)
            self._descriptor = -1
            seconds = listener.gettimeout()
            listener.settimeout(0)
            with suppress(OSError):
                listener.accept()[0].close()
            listener.settimeout(seconds)
        self.take()

    def forget(self) -> None:
        """In a forked process: its number may be another file's by now."""
        self._lock = threading.Lock()
        self._descriptor = -1


_reserve = _Reserve()
os.register_at_fork(after_in_child=_reserve.forget)


def accept(listener: socket.socket) -> socket.socket:
    """Returns the next connection.

    Raises OSError if there is none, or if no descriptor was left for it: then it is closed.
    """
    try:
        found, _ = listener.accept()
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR:
            _reserve.refuse(listener)
        raise
    _reserve.take()
    return found
