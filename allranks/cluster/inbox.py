"""What ranks and the nursery say, in one queue that the main thread empties.

While it waits, an interrupt is one more event in that queue, so that it never tears the handling
of another one apart.
"""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from allranks.records.wire import Record


@dataclass(frozen=True)
class FromRank:
    """A record that a rank sent, and its payloads."""

    record: Record
    payloads: list[bytes]


@dataclass(frozen=True)
class FromNursery:
    """An event that the nursery told."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pressed:
    """The user interrupted the notebook's kernel."""


@dataclass(frozen=True)
class Unread:
    """Something came from a rank that could not be read."""

    problem: Exception


Event = FromRank | FromNursery | Pressed | Unread


class Inbox:
    """The queue of one cluster's events."""

    def __init__(self) -> None:
        # Its put() may be called from a signal handler; queue.Queue's may not.
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def put(self, event: Event) -> None:
        """Adds an event, from any thread and from signal handlers."""
        self._queue.put(event)
        wake = self._wake
        if wake is not None:
            wake()

    def wait(self, seconds: float) -> list[Event]:
        """Returns the events that are there, or the first to come within ``seconds``."""
        events: list[Event] = []
        try:
            events.append(
                self._queue.get(timeout=seconds) if seconds > 0 else self._queue.get_nowait()
            )
            while True:
                events.append(self._queue.get_nowait())
        except queue.Empty:
            return events

    @contextmanager
    def waking(self) -> Iterator[Callable[[float], Awaitable[None]]]:
        """Within, a coroutine can await the next event, for so many seconds at most."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()

        async def next_event(seconds: float) -> None:
            try:
                await asyncio.wait_for(came.wait(), seconds)
            except TimeoutError:
                pass  # an interrupt does not wake a sleeping loop: the caller looks again
            except asyncio.CancelledError:
                # What an interrupt becomes where the kernel's own handler hears it.
                task = asyncio.current_task()
                if task is not None:
                    task.uncancel()
                self.put(Pressed())
            came.clear()

        def wake() -> None:
            with suppress(RuntimeError):  # the kernel is ending: its loop is closed already
                loop.call_soon_threadsafe(came.set)

        self._wake = wake
        if not self._queue.empty():
            came.set()
        try:
            yield next_event
        finally:
            self._wake = None

    @contextmanager
    def hearing_interrupts(self) -> Iterator[None]:
        """Within, SIGINT of this process is put into the queue instead of being raised."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def pressed(_signal: int, _frame: FrameType | None) -> None:
            self.put(Pressed())

        before = signal.signal(signal.SIGINT, pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
