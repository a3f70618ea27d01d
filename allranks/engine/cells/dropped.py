"""An interrupt that Python or IPython has dropped comes again.

What a finalizer raises, Python reports and drops, KeyboardInterrupt too: the cell would run on as
if nobody had interrupted it. A garbage collection runs finalizers between any two steps of a cell.
IPython drops what the callbacks of its events raise, those before and after each cell.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from signal import SIGINT, default_int_handler, getsignal
from types import FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell


def repeat_dropped_interrupts(press: Callable[[], None]) -> None:
    """Interrupts a cell again, once the finalizer has ended in which Python dropped it.

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
