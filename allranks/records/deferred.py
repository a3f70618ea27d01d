"""Ctrl-C, deferred where it would strand other ranks or leave work half done, raised where nothing
is awaited, and passed on. Both sides.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType


class Deferred:
    """Whether an interrupt arrived while it was deferred; then ``wake`` is called."""

    def __init__(self) -> None:
        self.pending = False
        self.wake: Callable[[], object] = lambda: None

    def hear(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler: notes the interrupt."""
        self.pending = True
        self.wake()

    def leave(self) -> None:
        """Raises a deferred interrupt; called where leaving is safe."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


@contextmanager
def deferred() -> Iterator[Deferred]:
    """Interrupts wait until the end of the block, or until `Deferred.leave`.

    A deferred interrupt then reaches the handler that was set before, also if the block raises.
    Only the main thread gets interrupts, so in other threads this does nothing.
    """
    held = Deferred()
    try:
        with interrupts_to(held.hear):
            yield held
    finally:
        if held.pending:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupts_to(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Interrupts of the block go to this handler; in other threads than the main one this does
    nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        # None: another library's, in C, which Python cannot set again.
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)


def interruptible() -> AbstractContextManager[None]:
    """Interrupts raise KeyboardInterrupt in the block at once.

    In a cell with an ``await``, ipykernel only cancels what is awaited: a wait of another kind
    would go on.
    """
    return interrupts_to(signal.default_int_handler)
