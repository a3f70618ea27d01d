"""Calls of several threads on the same ranks, each in its turn; and what calls print."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from allranks.cluster.cell_run import HiddenView
from allranks.cluster.state import ClusterState
from allranks.records.deferred import deferred
from allranks.records.wire import Output

_POLL_SECONDS = 0.01


class CapturedOutput(HiddenView):
    """A view that shows nothing, and has what each rank printed: ``captured[0]`` is rank 0's text.

    Displays are in it as text. For the whole output, including long output, see the logs.
    """

    def __init__(self) -> None:
        self._parts = defaultdict[int, list[str]](list)
        self.notices: list[str] = []
        """Lines about the call as a whole."""
        super().__init__(self._take, self.notices.append)

    def _take(self, batch: Output) -> None:
        for kind, *rest in batch.entries:
            if kind in ("out", "err"):
                self._parts[batch.rank].append(rest[0])
            elif kind in ("display", "result"):
                self._parts[batch.rank].append(f"{rest[0].get('text/plain', '')}\n")

    def __getitem__(self, rank: int) -> str:
        return "".join(self._parts.get(rank, ()))


class Turns:
    """The calls of several threads wait for each other, in any order. Submitted calls have a thread
    of their own, and so run in their order.

    If the ``caller`` of the ranks asks for another turn, it would wait for itself: ``refuse`` then
    raises an error, unless the call has just ended.
    """

    def __init__(self, ranks: ClusterState, refuse: Callable[[], None]) -> None:
        self._ranks, self._refuse = ranks, refuse
        self._lock = threading.RLock()
        #: Not the lock of the turns, which a running call has: `submit` returns at once.
        self._submitting = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def renew(self) -> None:
        """In a forked process: the threads that have locks, or run calls, are its parent's."""
        self._lock, self._submitting = threading.RLock(), threading.Lock()
        self._executor = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within, it is the turn of this thread."""
        # First: another thread's call may have the turn, and wait for the cell of this one.
        if self._ranks.caller == threading.get_ident():
            self._refuse()
        # At the end of its cell, for which those wait that have the lock.
        if self._ranks.caller == threading.get_ident():
            yield
            return
        with ExitStack() as turn:
            # An interrupt ends the wait, also in a cell that awaits, and leaves no lock taken.
            with deferred() as interrupt:
                while not self._lock.acquire(timeout=_POLL_SECONDS):
                    interrupt.leave()
                turn.callback(self._lock.release)
                # No event: the thread that has begun a cell may end without a wait for it.
                while self._ranks.caller in _other_threads():
                    interrupt.leave()
                    time.sleep(_POLL_SECONDS)
            yield

    def submit(self, call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        """Makes a call in the thread of submitted calls."""
        with self._submitting:
            # One thread: cells cannot run side by side, and this keeps the calls in their order.
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "allranks-calls")
            return self._executor.submit(call, *args, **options)

    def end_submitted(self, *, wait: bool) -> None:
        """Waits for the submitted calls, or cancels those that have not begun."""
        with self._submitting:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=wait, cancel_futures=not wait)


def _other_threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
