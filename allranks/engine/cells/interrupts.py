"""The interrupts of the cell that runs: when they are heard, and what hears them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from signal import pthread_kill
from signal import signal as on_signal
from types import FrameType
from typing import Any

from allranks.engine.cells.commands import interrupt_children
from allranks.engine.cells.waking import listen, wake

# A cell may replace what other modules hold: what its end needs is taken from them here.
MAIN_THREAD = threading.main_thread().ident or 0


def ignore_interrupt(_signal: int, _frame: FrameType | None) -> None:
    """The handler of SIGINT while no cell runs: an interrupt that comes late does nothing."""


class Interrupts:
    """Interrupts for the main thread, in which cells run one after the other.

    Args:
        press: called with each, before the cell is interrupted.

    Attributes:
        count: how many the cell has been sent.
    """

    def __init__(self, press: Callable[[], object]) -> None:
        self.count = 0
        self._press = press
        self._number = 0
        self._hearing = 0
        self._early = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        listen()

    def begin(self, cell: int) -> None:
        """A cell begins, which does not hear them yet."""
        self.count = 0
        self._number = cell

    @property
    def heard(self) -> bool:
        """Whether a cell hears them now."""
        return bool(self._hearing)

    def hear(self, task: asyncio.Task[Any] | None = None) -> None:
        """Lets SIGINT end the cell; an interrupt that came before it had begun counts too.

        Args:
            task: the cell, where it awaits: raising would hit the event loop instead.

        Raises:
            KeyboardInterrupt: one has come before.
        """

        def cancel(_signal: int, _frame: FrameType | None) -> None:
            assert task is not None
            task.get_loop().call_soon_threadsafe(task.cancel)

        # Python's own handler is no Python function: it leaves no frame in the traceback.
        on_signal(signal.SIGINT, cancel if task else signal.default_int_handler)
        with self._lock:
            self._hearing = self._number
            early = self._early == self._number
        if early:
            raise KeyboardInterrupt

    def hear_no_more(self) -> None:
        """The cell has ended."""
        on_signal(signal.SIGINT, ignore_interrupt)
        with self._lock:
            self._hearing = 0
        self._over.set()

    def send(self, cell: int) -> None:
        """Raises KeyboardInterrupt in the main thread, while or before it runs this cell."""
        with self._lock:
            if self._hearing == cell:
                self.count += 1
                self._press()
                pthread_kill(MAIN_THREAD, signal.SIGINT)
                interrupt_children()
                self._over = threading.Event()
                wake(MAIN_THREAD, self._over)
            else:
                self._early = cell

    def repeat(self) -> None:
        """Sends one again that was dropped."""
        # Only the main thread, which this is, sets what is heard.
        if self._hearing:
            signal.raise_signal(signal.SIGINT)
