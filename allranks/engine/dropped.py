"""An interrupt that Python or IPython has dropped comes again.

What a finalizer raises, Python reports and drops, KeyboardInterrupt too: the cell would run on as
if nobody had interrupted it. A garbage collection runs finalizers between any two steps of a cell.
IPython drops what the callbacks of its events raise, those before and after each cell.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from signal import SIGINT, default_int_handler, getsignal
from time import sleep
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

_AGAIN_SECONDS = 0.02
"""Long enough for the finalizer to end; one that has not drops the next interrupt as well."""


def repeat_dropped_interrupts(cell: Callable[[], int], press: Callable[[int], None]) -> None:
    """Interrupts a cell again, soon after Python has dropped its KeyboardInterrupt.

    Args:
        cell: returns the number of the cell that runs now.
        press: interrupts a cell, given its number; called in a thread of its own.
    """
    report = sys.unraisablehook

    def press_again(number: int) -> None:
        sleep(_AGAIN_SECONDS)
        press(number)

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            # Not a threading.Thread, whose start takes locks that the interrupted code may hold.
            _thread.start_new_thread(press_again, (cell(),))
        else:
            report(unraisable)

    sys.unraisablehook = dropped


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
