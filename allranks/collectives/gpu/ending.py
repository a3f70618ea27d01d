"""The end of NCCL communicators: all of a rank's at once, in a thread.

An abort returns once every member has aborted, and it waits for the whole GPU: it can be blocked
by a member that computes, and by the kernel of another communicator that nobody has aborted yet.
So what is to end is gathered here, aborted as one group, and waited for by a thread.

Source: NCCL user guide, "Fault Tolerance" and "Group Calls"; NCCL 2.30, src/init.cc,
ncclCommAbort, which tells the kernels to end at once and leaves the rest to ncclGroupEnd.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from allranks.collectives.gpu.api import Communicator, load_nccl

_IN_A_GROUP = 22200
"""The NCCL from which aborts may be made within a group."""


class Ending:
    """Communicators that nobody uses any more, until they have been aborted."""

    def __init__(self) -> None:
        self._parked: list[Communicator] = []
        self._threads: list[threading.Thread] = []

    def park(self, communicator: Communicator) -> None:
        """Keeps it until the next `abort`: other members may still be served by this rank's end."""
        self._parked.append(communicator)

    def abort(self) -> None:
        """Aborts all that are parked, together; returns at once."""
        ended, self._parked = self._parked, []
        self._threads = [each for each in self._threads if each.is_alive()]
        if ended:
            thread = threading.Thread(
                target=_abort, args=[ended], name="allranks-nccl-abort", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def wait(self, seconds: float) -> None:
        """Returns when all aborts have, or after so long."""
        end = time.monotonic() + seconds
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))


def _abort(communicators: list[Communicator]) -> None:
    nccl = load_nccl()
    together = nccl.get_version() >= _IN_A_GROUP
    if together:
        nccl.groupStart()
    for each in communicators:
        with suppress(Exception):  # of one that has failed there is nothing left to end
            each.abort()
    if together:
        with suppress(Exception):
            nccl.groupEnd()
