"""The order of calls, and the aborts, of all NCCL communicators of one GPU.

NCCL's kernels wait for each other between GPUs, and one may keep another from starting: a GPU has
to start those of several communicators in the same order everywhere. Programs post to their process
sets in any order, so the ranks number a call once all of its members have arrived: each proposes a
number above all that it has seen, the call gets the largest, and every rank goes by these numbers.

An abort returns once every member has aborted, and it waits for the whole GPU: it can be blocked by
a member that computes, and by the kernel of a communicator that is not aborted yet. So
communicators that are to end are collected, aborted as one group, and awaited by a thread.

Source: NCCL user guide, "Using multiple NCCL communicators concurrently", "Fault Tolerance" and
"Group Calls"; NCCL 2.30, src/init.cc, ncclCommAbort, which makes kernels and waiting calls end at
once, and leaves the rest, freeing the communicator, to ncclGroupEnd. The numbering is Skeen's:
K. Birman and T. Joseph, Reliable communication in the presence of failures, 1987, section 3.2.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from allranks.collectives.calls.call import Call, Steps, Transport
from allranks.collectives.gpu.cupy_api import Communicator, load_nccl


class NcclCallOrder:
    """The calls that this rank has agreed on and that have not ended, by their numbers."""

    def __init__(self) -> None:
        self._last = 0
        self._calls: dict[int, tuple[tuple[int, int], Call]] = {}
        """For each group its call, with the call's number, or the least number that it can get."""

    def enter(self, call: Call, host: Transport) -> Steps[None]:
        """Ends when it is this call's turn on all of its members, which have agreed on it."""
        number, size = call.members.number, call.members.size
        self._last += 1
        self._calls[number] = (self._last, number), call
        proposed = np.array([self._last], np.int64).view(np.uint8)
        every: list[Any] = yield from call.moved(host.allgather, proposed, [8] * size)
        chosen = max(int(each.view(np.int64)[0]) for each in every)
        self._last = max(self._last, chosen)
        mine = chosen, number
        self._calls[number] = mine, call
        call.stage += 1
        # A call whose number is only proposed gets that number or a larger one.
        while (ahead := min(self._calls.values()))[0] < mine:
            call.behind = ahead[1]
            yield call
        call.behind = None
        # On a member whose turn has not come the host may have to act first, and work launched here
        # could block it: a call that waits for the whole GPU waits for the other members.
        yield from call.moved(host.allgather, proposed[:1], [1] * size)
        call.stage += 1

    def leave(self, call: Call) -> None:
        call.behind = None
        found = self._calls.get(call.members.number)
        if found is not None and found[1] is call:
            del self._calls[call.members.number]

    def clear(self) -> None:
        self._calls.clear()


_IN_A_GROUP = 22200
"""The first NCCL version that allows aborts within a group."""
_Parked = tuple[Communicator, threading.Thread | None]
"""A communicator, and a thread that may still be in a call on it."""


class Aborts:
    """Communicators that are no longer used, until they have been aborted."""

    def __init__(self, use_gpu: Callable[[], None]) -> None:
        self._use_gpu = use_gpu
        self._parked: list[_Parked] = []
        self._threads: list[threading.Thread] = []
        # The threads that create communicators park those whose call was left.
        self._lock = threading.Lock()

    def park(self, communicator: Communicator, user: threading.Thread | None = None) -> None:
        """Keeps it until the next `abort`: other members may still need this rank's end of it.
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
            start_thread(thread)
        except RuntimeError:  # no thread available: abort them the next time
            with self._lock:
                self._parked = [*ended, *self._parked]
            return
        with self._lock:
            self._threads = [each for each in [*self._threads, thread] if each.is_alive()]

    def wait(self, seconds: float) -> None:
        """Returns when all aborts have returned, or after ``seconds``."""
        end = time.monotonic() + seconds
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            _join(thread, end - time.monotonic())

    def _abort(self, ended: list[_Parked]) -> None:
        with suppress(RuntimeError):  # if the GPU has failed NCCL still ends its host side
            self._use_gpu()
        nccl = load_nccl()
        together = nccl.get_version() >= _IN_A_GROUP
        if together:
            nccl.groupStart()
        # Outside a group an abort frees at once, but a call on the communicator may never end.
        for communicator, user in sorted(ended, key=lambda parked: parked[1] is not None):
            if not together:
                _join(user)
            with suppress(Exception):  # one that has failed needs no abort
                communicator.abort()
        if together:
            # Their calls end now; the end of the group frees the communicators.
            for _, user in ended:
                _join(user)
            with suppress(Exception):
                nccl.groupEnd()


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread; while the interpreter ends, runs it in this thread instead. Raises
    RuntimeError if the system allows no further thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        # Only the text shows it: sys.is_finalizing() is not true yet.
        if "interpreter shutdown" not in str(error):
            raise
        # No thread can be started from then on: Python 3.12, "What's New".
        thread.run()


def _join(thread: threading.Thread | None, seconds: float | None = None) -> None:
    if thread is not None and thread is not threading.current_thread() and thread.is_alive():
        thread.join(None if seconds is None else max(0.0, seconds))
