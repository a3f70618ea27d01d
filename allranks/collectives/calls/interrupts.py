"""Ctrl-C, heard outside the main thread."""

from __future__ import annotations

import os
import signal
import threading


class Ear:
    """Hears Ctrl-C for a wait in another thread while the main thread cannot.

    Python runs signal handlers in the main thread, and between two of its steps only. While
    TensorFlow runs a graph there is no such step until the graph has ended, and the graph may
    wait for another rank, in a thread of TensorFlow's. Python tells of a signal at once through a
    file descriptor, if there is one.
    """

    def __init__(self) -> None:
        self._read = -1

    def open(self) -> None:
        """Listens from now on, unless somebody else does, or this is not the main thread."""
        if self._read >= 0 or threading.current_thread() is not threading.main_thread():
            return
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before >= 0:
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._read = read

    def heard(self) -> bool:
        """Whether an interrupt has come since it was asked last."""
        try:
            return self._read >= 0 and signal.SIGINT in os.read(self._read, 4096)
        except BlockingIOError:
            return False


ear = Ear()
