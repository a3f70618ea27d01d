"""TensorFlow's threads as Python sees them. Runs in every rank."""

from __future__ import annotations

import ctypes
import threading

_kept = threading.local()


def keep() -> None:
    """Lets this thread keep its Python state until it ends.

    A thread that TensorFlow has started gets a new state from Python for every call, memory from
    the system included, and loses it after the call: 50 to 90 µs of a training step on 2 cores.
    """
    if not hasattr(_kept, "state"):
        # Never released: the call that is under way leaves its state behind.
        _kept.state = ctypes.pythonapi.PyGILState_Ensure()
