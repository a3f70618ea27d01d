"""The end of NCCL communicators: all of a rank's at once, in a thread.

An abort returns once every member has aborted, and it waits for the whole GPU: it can be blocked
by a member that computes, and by the kernel of another communicator that nobody has aborted yet.
So what is to end is gathered here, aborted as one group, and waited for by a thread.

Source: NCCL user guide, "Fault Tolerance" and "Group Calls"; NCCL 2.30, src/init.cc,
ncclCommAbort, which tells the kernels and the calls that wait to end at once, and leaves the rest,
freeing the communicator, to ncclGroupEnd.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from allranks.collectives.gpu.api import Communicator, load_nccl

_IN_A_GROUP = 22200
"""The NCCL from which aborts may be made within a group."""
_Parked = tuple[Communicator, threading.Thread | None]
"""A communicator, and the thread that may still be in a call on it."""


class Ending:
    """Communicators that nobody uses any more, until they have been aborted."""

    def __init__(self, use_gpu: Callable[[], None]) -> None:
        self._use_gpu = use_gpu
        self._parked: list[_Parked] = []
        self._threads: list[threading.Thread] = []
        # The threads that make communicators park those that nobody waits for any more.
        self._lock = threading.Lock()

    def park(self, communicator: Communicator, user: threading.Thread | None = None) -> None:
        """Keeps it until the next `abort`: other members may still be served by this rank's end.

        ``user`` is a thread that may be in a call on it; the abort ends that call.
        """
        with self._lock:
            self._parked.append((communicator, user))

    def abort(self) -> None:
        """Aborts all that are parked, together; returns at once."""
        with self._lock:
            ended, self._parked = self._parked, []
        if not ended:
            return
        thread = threading.Thread(
            target=self._abort, args=[ended], name="allranks-nccl-abort", daemon=True
        )
        try:
            begin(thread)
        except RuntimeError:  # there is no room for one: the next time
            with self._lock:
                self._parked = [*ended, *self._parked]
            return
        with self._lock:
            self._threads = [each for each in [*self._threads, thread] if each.is_alive()]

    def wait(self, seconds: float) -> None:
        """Returns when all aborts have, or after so long."""
        end = time.monotonic() + seconds
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            _join(thread, end - time.monotonic())

    def _abort(self, ended: list[_Parked]) -> None:
        with suppress(RuntimeError):  # of a GPU that has failed NCCL still ends what is the host's
            self._use_gpu()
        nccl = load_nccl()
        together = nccl.get_version() >= _IN_A_GROUP
        if together:
            nccl.groupStart()
        # Alone an abort frees at once, and a call on the communicator may never end: those go last.
        for communicator, user in sorted(ended, key=lambda parked: parked[1] is not None):
            if not together:
                _join(user)
            with suppress(Exception):  # of one that has failed there is nothing left to end
                communicator.abort()
        if together:
            # They have been told to end; what they are in is freed by the end of the group.
            for _, user in ended:
                _join(user)
            with suppress(Exception):
                nccl.groupEnd()


def begin(thread: threading.Thread) -> None:
    """Starts a thread; while the interpreter ends, does here what it would have done.

    Source: Python 3.12, "What's New": no thread can be started from then on.

    Raises:
        RuntimeError: the system allows no further thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        # Python has no other word for it: sys.is_finalizing() is not true yet.
        if "interpreter shutdown" not in str(error):
            raise
        thread.run()


def _join(thread: threading.Thread | None, seconds: float | None = None) -> None:
    """Waits for the end of a thread, if it is one that runs and another than this."""
    if thread is not None and thread is not threading.current_thread() and thread.is_alive():
        thread.join(None if seconds is None else max(0.0, seconds))
