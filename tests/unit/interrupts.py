"""Interrupts at each step of a function."""

import gc
import signal
import sys


def press():
    signal.raise_signal(signal.SIGINT)


HEARD = "call", "c_return"
"""The events of a profile at which Python itself calls the handlers of signals."""


def pressed_at(step, function, *arguments, events=("call", "return", "c_call", "c_return")):
    """Calls a function, interrupted at one of its steps; returns whether it has come so far.

    Python drops an interrupt in a finalizer, which a garbage collection would run at any step.
    """
    steps, over = 0, False

    def hook(_frame, event, _argument):
        nonlocal steps
        if over or event not in events:
            return
        steps += 1
        if steps == step:
            press()

    gc.disable()
    try:
        sys.setprofile(hook)
        function(*arguments)
        over = True
    except KeyboardInterrupt:
        over = True
    finally:
        sys.setprofile(None)
        gc.enable()
    return steps >= step
