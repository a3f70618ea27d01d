"""The events of one GPU, which are used again, so that calls need not make any.

Whoever asks for an event no more gives it back, and it may be recorded again at once: a stream that
was told to wait for it waits for what it marked then. A call that is left gives nothing back: its
events go with it.

Source: CUDA runtime API, cudaEventRecord.
"""

from __future__ import annotations

from collections.abc import Callable

from allranks.collectives.gpu.api import Event

_KEPT = 64
"""Of either kind; only many calls that were posted together use more at once."""


class Events:
    """Events that nobody uses: those that tell the time, and those that only happen."""

    def __init__(self, make: Callable[[bool], Event]) -> None:
        self._make = make
        self._spare: dict[bool, list[Event]] = {False: [], True: []}

    def take(self, *, timed: bool = False) -> Event:
        """An event to be recorded; ``timed`` is whether it tells the time."""
        # Not after a look whether there is one: what connects NCCL is another thread.
        try:
            return self._spare[timed].pop()
        except IndexError:
            return self._make(timed)

    def give_back(self, *events: Event, timed: bool = False) -> None:
        """Nobody asks for these any more."""
        spare = self._spare[timed]
        if len(spare) < _KEPT:
            spare.extend(events)
