"""The thread that answers, for a rank that is busy, where it is.

It reads and writes the board four times a second and never touches MPI.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from allranks.collectives.calls import board as fields
from allranks.collectives.calls import frames
from allranks.collectives.calls.board import Board
from allranks.collectives.calls.callsite import of_frame

_PERIOD_SECONDS = 0.25


class Whereabouts(threading.Thread):
    """Writes the line of the rank's main thread whenever another rank asks."""

    def __init__(self, board: Board, rank: int, thread: int) -> None:
        super().__init__(name="allranks-whereabouts", daemon=True)
        self.board, self.rank, self.thread = board, rank, thread
        self.also: list[Callable[[], object]] = []
        """What else has to be looked after while the main thread is busy."""
        self._stopped = threading.Event()

    def run(self) -> None:
        """Answers until it is stopped."""
        while not self._stopped.wait(_PERIOD_SECONDS):
            self.answer()
            for look in self.also:
                look()

    def answer(self) -> None:
        """Answers, if there is a question."""
        asked = self.board.get(self.rank, fields.ASKED)
        if asked == self.board.get(self.rank, fields.ANSWERED):
            return
        frame = frames.of_threads().get(self.thread)
        self.board.write(fields.LINE, str(of_frame(frame)))
        self.board.put(fields.ANSWERED, asked or time.time_ns())

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
