"""The interrupts of the cell that runs: when they are heard, and what hears them."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from signal import SIGINT, default_int_handler, getsignal, pthread_kill
from signal import signal as on_signal
from types import FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from allranks.engine.cells.commands import interrupt_children

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


# Python runs the handler of a signal between two of its own steps. If a signal comes after the last
# step before a call blocks, its handler runs when that call returns: a minute later for
# ``time.sleep(60)``. A second signal, whose handler does nothing, makes the call check at once.
#: No library uses it, and without a handler it has no effect.
_SIGNAL = signal.SIGURG
#: When the second signal is sent, after an interrupt.
_AFTER_SECONDS = (0.05, 0.2, 1.0, 4.0)


def _nothing(*_: object) -> None:
    """Python handles what else has come before it calls this."""


def listen() -> None:
    """Lets the main thread, which this is, be woken; a handler that is there stays."""
    if signal.getsignal(_SIGNAL) in (signal.SIG_DFL, None):
        signal.signal(_SIGNAL, _nothing)


def wake(thread: int, over: threading.Event) -> None:
    """Has a thread that was sent an interrupt look at it, wherever it is blocked.

    Args:
        thread: its identity.
        over: set when the cell has ended that was interrupted.
    """

    def again() -> None:
        for seconds in _AFTER_SECONDS:
            if over.wait(seconds) or signal.getsignal(_SIGNAL) is not _nothing:
                return
            signal.pthread_kill(thread, _SIGNAL)

    threading.Thread(target=again, name="allranks-wake", daemon=True).start()


def repeat_dropped_interrupts(press: Callable[[], None]) -> None:
    """Interrupts a cell again, once the finalizer has ended in which Python dropped it.

    Python reports and drops what a finalizer raises, also KeyboardInterrupt, and a garbage
    collection runs finalizers between any two steps of a cell.

    Args:
        press: interrupts the cell that runs now; called in the main thread.
    """
    report = sys.unraisablehook

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if unraisable.exc_type is KeyboardInterrupt and in_main_thread:
            _at_next_step(sys._getframe(1), press)
        else:
            report(unraisable)

    sys.unraisablehook = dropped


def _at_next_step(frame: FrameType, do: Callable[[], None]) -> None:
    """Calls a function before the next step of a frame; what it raises is raised there.

    Not after a moment: a loop may be in one finalizer or another nearly all the time.
    """
    before, local, opcodes = sys.gettrace(), frame.f_trace, frame.f_trace_opcodes

    def step(*_: object) -> Any:
        frame.f_trace, frame.f_trace_opcodes = local, opcodes
        sys.settrace(before)
        do()
        return local

    def follow_no_calls(*_: object) -> None:
        """Further finalizers may run first: what is raised in one would be dropped as well."""

    frame.f_trace, frame.f_trace_opcodes = step, True
    sys.settrace(follow_no_calls)


def raise_what_events_drop(shell: InteractiveShell, interrupts: Callable[[], int]) -> None:
    """Has an interrupt end the cell that came while callbacks of IPython's events ran.

    IPython drops what these callbacks raise, before and after each cell.

    Args:
        shell: whose events.
        interrupts: returns how many the cell has been sent.
    """
    as_ipython = shell.events.trigger

    def trigger(event: str, *arguments: Any, **options: Any) -> None:
        before = interrupts()
        as_ipython(event, *arguments, **options)
        # A cell that awaits is cancelled instead, which nobody drops.
        if interrupts() != before and getsignal(SIGINT) is default_int_handler:
            raise KeyboardInterrupt

    setattr(shell.events, "trigger", trigger)  # noqa: B010  a method, to mypy
