"""An interrupt that came just before a call blocks ends that call too.

Python runs the handler of a signal between two of its own steps. A signal that comes after the
last step before a call blocks is therefore handled when that call ends, ``time.sleep(60)`` after
a minute. A second signal, which does nothing by itself, makes the call look.
"""

from __future__ import annotations

import signal
import threading

#: What nothing else uses, and what does nothing where nobody handles it.
_SIGNAL = signal.SIGURG
#: When, after an interrupt, the call is made to look.
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
