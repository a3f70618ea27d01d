"""Ctrl-C, kept back where leaving would strand others or leave something half done. Both sides."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Deferred:
    """Whether an interrupt has come while it was kept back."""

    def __init__(self) -> None:
        self.pending = False

    def hear(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler: notes the interrupt."""
        self.pending = True

    def leave(self) -> None:
        """Raises the interrupt that was kept back; called where leaving does no harm."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


@contextmanager
def deferred() -> Iterator[Deferred]:
    """Interrupts wait until the end of the block, or until `Deferred.leave`.

    One that has come is then heard as it would have been without the block, even where the block
    raises something else. Only the main thread hears interrupts: elsewhere there is nothing to do.
    """
    held = Deferred()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = signal.signal(signal.SIGINT, held.hear)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
        if held.pending:
            signal.raise_signal(signal.SIGINT)
