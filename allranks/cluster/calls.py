"""Calls of several threads on the same ranks, each in its turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from allranks.cluster.state import ClusterState
from allranks.records.deferred import deferred

#: An interrupt may come just where a thread is about to wake others: they look again by themselves.
#: To defer it there would make each cell longer.
_LOOK_SECONDS = 1.0


class _ThreadEnd:
    """One in the locals of a thread wakes others when the thread ends."""

    def __init__(self, waiting: list[SimpleQueue[None]]) -> None:
        self._waiting = waiting

    def __del__(self) -> None:
        _wake(self._waiting)


class Turns:
    """The calls of several threads wait for each other, in any order. Submitted calls have a thread
    of their own, and so run in their order.

    If the ``caller`` of the ranks asks for another turn, it would wait for itself: ``refuse`` then
    raises an error, unless the call has just ended.
    """

    def __init__(self, ranks: ClusterState, refuse: Callable[[], None]) -> None:
        self._ranks, self._refuse = ranks, refuse
        self.renew()

    def renew(self) -> None:
        """In a forked process: the threads that have the turn, or run calls, are its parent's."""
        #: Has the thread whose turn it is, from the beginning of its call to the end. No lock: a
        #: wait for one could not end with an interrupt, or with the end of another thread's cell.
        #: One call of a dict takes the turn, and one gives it back: no interrupt comes between.
        self._turn: dict[str, int] = {}
        #: One for each thread that waits: an item has it look again.
        self._waiting: list[SimpleQueue[None]] = []
        self._locals = threading.local()
        self._executor = _submitted_calls()

    def wake(self) -> None:
        """Has the threads that wait look again: the ``caller`` of the ranks has changed."""
        _wake(self._waiting)

    @property
    def is_of_another(self) -> bool:
        """Whether a call of another thread runs: that one handles what comes from the ranks."""
        caller = self._ranks.caller
        if caller in (0, threading.get_ident()):
            return False
        # Else it has begun a cell, and has ended without a wait for it.
        return any(thread.ident == caller for thread in threading.enumerate())

    def await_own(self, seconds: float) -> None:
        """Returns when a call of another thread may have ended, or after some seconds."""
        changed: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(changed)
        try:
            if self.is_of_another:  # it may have ended before
                _await(changed, seconds)
        finally:
            self._waiting.remove(changed)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within, it is the turn of this thread."""
        # First: another thread's call may have the turn, and wait for the cell of this one.
        if self._ranks.caller == threading.get_ident():
            self._refuse()
            # Its cell is ending, and the thread that has the turn waits for that.
            if self._ranks.caller == threading.get_ident():
                yield
                return
        # The thread that begins a cell may end without a wait for it.
        if not hasattr(self._locals, "end"):
            self._locals.end = _ThreadEnd(self._waiting)
        changed: SimpleQueue[None] = SimpleQueue()
        outer, took = self._is_taken_here(), False
        try:
            # An interrupt ends the wait, also in a cell that awaits, and leaves no turn taken.
            with deferred() as interrupt:
                interrupt.wake = lambda: changed.put(None)
                self._waiting.append(changed)
                try:
                    while not (took := self._take()):
                        interrupt.leave()
                        _await(changed)
                    while self.is_of_another:
                        interrupt.leave()
                        _await(changed)
                finally:
                    self._waiting.remove(changed)
            yield
        finally:
            # No ExitStack, and no method: an interrupt in their Python would leave it taken.
            if took and not outer:
                self._turn.clear()
                self.wake()

    @contextmanager
    def taken_if_free(self) -> Iterator[bool]:
        """Within, it is the turn of this thread, unless a call of another thread has it."""
        if self._ranks.caller == threading.get_ident():
            yield True  # as in `taken`
            return
        outer, free = self._is_taken_here(), False
        try:
            with deferred():  # an interrupt leaves no turn taken
                free = self._take()
            yield free
        finally:
            if free and not outer:  # as in `taken`
                self._turn.clear()
                self.wake()

    def _is_taken_here(self) -> bool:
        return self._turn.get("owner") == threading.get_ident()

    def _take(self) -> bool:
        """Takes the turn, if this thread does not have it yet; false if another one has it."""
        this = threading.get_ident()
        return self._turn.setdefault("owner", this) == this

    def submit(self, call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        """Makes a call in the thread of submitted calls."""
        executor = self._executor
        try:
            return executor.submit(call, *args, **options)
        except RuntimeError:
            if executor is self._executor:
                raise
            return self.submit(call, *args, **options)  # that one was ended in this moment

    def end_submitted(self, *, wait: bool) -> None:
        """Waits for the submitted calls, or cancels those that have not begun."""
        executor = self._executor
        self._executor = _submitted_calls()
        executor.shutdown(wait=wait, cancel_futures=not wait)


def _submitted_calls() -> ThreadPoolExecutor:
    # One thread: cells cannot run side by side, and this keeps the calls in their order.
    return ThreadPoolExecutor(1, "allranks-calls")


def _await(changed: SimpleQueue[None], seconds: float = _LOOK_SECONDS) -> None:
    with suppress(Empty):
        changed.get(timeout=seconds)


def _wake(waiting: list[SimpleQueue[None]]) -> None:
    for changed in [*waiting]:
        changed.put(None)
