"""Interrupts of the cell that runs: when it accepts them, and which waits they end."""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from signal import pthread_kill
from signal import signal as on_signal
from types import FrameType
from typing import Any

import ipykernel.zmqshell
import IPython.core.interactiveshell
import psutil
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magics.script import ScriptMagics

from allranks.collectives.calls import frames
from allranks.engine.shell_magics import replace_magic

# A cell may replace attributes of other modules: those that its end needs are imported here.
MAIN_THREAD = threading.main_thread().ident or 0

# Python runs the handler of a signal between two of its own steps. If a signal comes after the last
# step before a call blocks, its handler runs when that call returns: a minute later for
# ``time.sleep(60)``. A second signal makes the call check at once. A cell that awaits may begin a
# call before its event loop cancels it: then the handler of the second signal does.
#: No library uses it, and without a handler it has no effect.
_WAKE_SIGNAL = signal.SIGURG
#: When the second signal is sent, after an interrupt.
_WAKE_SECONDS = (0.05, 0.2, 1.0, 4.0)


#: Whether what the main thread does between two cells is to be interrupted.
_between_cells = threading.Event()


def ignore_interrupt(_signal: int, _frame: FrameType | None) -> None:
    # The handler while no cell runs: an interrupt of a cell that comes late does nothing.
    if _between_cells.is_set():
        _between_cells.clear()
        raise KeyboardInterrupt


def waits_for_events() -> bool:
    """Whether the main thread waits in its event loop for something to do."""
    code = getattr(frames.frame_of_main_thread(), "f_code", None)
    return code is not None and (code.co_name, code.co_filename) == _WAIT


#: Where the event loop waits.
_WAIT = ("select", selectors.DefaultSelector.select.__code__.co_filename)


class Interrupts:
    """Interrupts for the main thread, in which cells run one after the other.

    ``press`` is called at each interrupt, before it reaches the cell.

    Attributes:
        number: the cell that runs.
        count: how many interrupts it was sent.
    """

    def __init__(self, press: Callable[[], object]) -> None:
        self.count = 0
        self._press = press
        self.number = 0
        self._hearing = 0
        self._early = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        #: Cancels the cell that awaits, after an interrupt that has not reached it yet.
        self._untold: Callable[[], object] | None = None
        if signal.getsignal(_WAKE_SIGNAL) in (signal.SIG_DFL, None):
            # Before Python calls this, it calls the handlers of other signals that have come.
            signal.signal(_WAKE_SIGNAL, self._woken)
        #: The handler of SIGINT while a cell runs that awaits.
        self._cancel: Callable[[int, FrameType | None], object] | None = None

    @property
    def heard(self) -> bool:
        return bool(self._hearing)

    def hear(self, task: asyncio.Task[Any] | None = None) -> None:
        """Lets SIGINT end the cell from now on; raises KeyboardInterrupt if one came before."""

        # The cell awaits: in the event loop an exception would end the loop.
        def cancel(number: int, frame: FrameType | None) -> None:
            assert task is not None
            self._untold = task.cancel
            task.get_loop().call_soon_threadsafe(self._tell_task)
            self._tell_code(number, frame)

        _between_cells.clear()
        self._untold, self._cancel = None, cancel
        # Python's own handler is no Python function: it leaves no frame in the traceback.
        on_signal(signal.SIGINT, cancel if task else signal.default_int_handler)
        with self._lock:
            self._hearing = self.number
            early = self._early == self.number
            if early:
                self._early = 0  # all requests of a client have the same number
        if early:
            raise KeyboardInterrupt

    def _tell_task(self) -> None:
        cancel, self._untold = self._untold, None
        if cancel is not None:
            cancel()

    def _tell_code(self, _signal: int, frame: FrameType | None) -> None:
        # The code of the cell itself may block the event loop.
        if self._untold is not None and _is_in_cell(frame):
            self._untold = None
            raise KeyboardInterrupt

    def _woken(self, number: int, frame: FrameType | None) -> None:
        # Where interrupts are postponed, SIGINT has another handler.
        if signal.getsignal(signal.SIGINT) is self._cancel:
            self._tell_code(number, frame)

    def hear_no_more(self) -> None:
        on_signal(signal.SIGINT, ignore_interrupt)
        self._untold = None
        with self._lock:
            self._hearing = 0
        self._over.set()

    def end_between_cells(self) -> None:
        """Raises KeyboardInterrupt in the main thread while it runs no cell, and does not wait. It
        may run a request of a client.
        """
        with self._lock:
            if waits_for_events():
                return
            self._press()
            if not self._hearing:
                _between_cells.set()
            pthread_kill(MAIN_THREAD, signal.SIGINT)
            self._over = threading.Event()
            self._wake()

    def send(self, cell: int, early: bool = True) -> None:
        """Raises KeyboardInterrupt in the main thread, while it runs this cell or, if ``early``,
        before: not of a request that may have ended just now, as all have the same number.
        """
        with self._lock:
            if self._hearing == cell:
                self.count += 1
                self._press()
                pthread_kill(MAIN_THREAD, signal.SIGINT)
                _interrupt_children()
                self._over = threading.Event()
                self._wake()
            elif early:
                self._early = cell

    def wait_for_end(self, seconds: float) -> None:
        """Waits in another thread until what was interrupted has ended."""
        self._over.wait(seconds)

    def _wake(self) -> None:
        """Has the main thread run the handler of its interrupt although it is blocked in a call."""
        over, woken = self._over, self._woken

        def again() -> None:
            for seconds in _WAKE_SECONDS:
                if over.wait(seconds) or signal.getsignal(_WAKE_SIGNAL) != woken:
                    return
                signal.pthread_kill(MAIN_THREAD, _WAKE_SIGNAL)

        threading.Thread(target=again, name="allranks-wake", daemon=True).start()

    def repeat(self) -> None:
        # No lock: only the main thread changes `_hearing`.
        if self._hearing:
            signal.raise_signal(signal.SIGINT)


#: It runs the code of a cell, in frames above its own.
_RUNS_CODE = InteractiveShell.run_code.__code__


def _is_in_cell(frame: FrameType | None) -> bool:
    """Whether the cell's own code runs: not another task's, nor IPython's before or after it."""
    called = ""
    while frame is not None and frame.f_code is not _RUNS_CODE:
        called, frame = frame.f_globals.get("__name__", ""), frame.f_back
    return frame is not None and called == "__main__"


def _interrupt_children() -> None:
    # As a terminal does, which leaves a process in a process group of its own alone.
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError):  # it has ended meanwhile
            if os.getpgid(child.pid) == os.getpgrp():
                os.kill(child.pid, signal.SIGINT)


def repeat_dropped_interrupts(press: Callable[[], None]) -> None:
    """Interrupts a cell again after a finalizer in which Python dropped the interrupt.

    Python reports and drops exceptions of finalizers, also KeyboardInterrupt, and a garbage
    collection runs finalizers between any two steps of a cell. ``press`` is called in the main
    thread.
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
    """Calls a function before the next step of a frame, which gets what the function raises.

    A delay would not do: a loop may spend nearly all its time in finalizers.
    """
    before, local, opcodes = sys.gettrace(), frame.f_trace, frame.f_trace_opcodes

    def step(*_: object) -> Any:
        frame.f_trace, frame.f_trace_opcodes = local, opcodes
        sys.settrace(before)
        do()
        return local

    def follow_no_calls(*_: object) -> None:
        # Further finalizers may run first: an exception in one would be dropped as well.
        ...

    frame.f_trace, frame.f_trace_opcodes = step, True
    sys.settrace(follow_no_calls)


def _session_leaders() -> set[int]:
    """Returns the children of this process that lead a session."""
    found = set()
    for child in psutil.Process().children():
        with suppress(OSError):
            if os.getsid(child.pid) == child.pid:
                found.add(child.pid)
    return found


_SHEBANG = ScriptMagics.shebang


def end_cells_too(shell: InteractiveShell, interrupts: Interrupts) -> None:
    """Has ``!command``, ``x = !command`` and ``%%bash`` raise the KeyboardInterrupt they caught.

    IPython ends the command and goes on with the next line of the cell. A cell of several commands
    would have to be interrupted several times, and the second interrupt ends the ranks.
    """

    def loud(quiet: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(quiet)
        def run(*args: Any, **kwargs: Any) -> Any:
            before, others = interrupts.count, _session_leaders()
            try:
                return quiet(*args, **kwargs)
            finally:
                if interrupts.count > before:
                    # IPython does not know the process of a command that has just begun.
                    for leader in _session_leaders() - others:
                        with suppress(OSError):
                            os.killpg(leader, signal.SIGKILL)
                    raise KeyboardInterrupt from None

        return run

    # Not the shell's methods, which inspect their caller's frame, but the functions below them.
    for module, name in (
        (ipykernel.zmqshell, "system"),
        (IPython.core.interactiveshell, "getoutput"),
    ):
        setattr(module, name, loud(getattr(module, name)))
    replace_magic(shell, ScriptMagics, "script", "shebang", loud(_SHEBANG))
