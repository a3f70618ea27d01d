"""What the ranks of one host tell, a few times a second, goes to the notebook as one message.

Each rank sends what it writes and how it fares twenty times a second, and the notebook would wake
for each of them. Here these wait for each other, for as long as one such beat at most, and what
comes after a silence goes at once. All else goes at once, behind what had waited, so that each
rank is heard in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import zmq

from allranks.records.wire import join_messages

TICK_SECONDS = 0.05
#: What can wait, by how its first frame begins.
_WAITS = tuple(f'["{name}"'.encode() for name in ("Output", "Points", "Timings", "Pulse"))
_LONGEST = max(map(len, _WAITS))
#: What is larger goes by itself: a message arrives as a whole.
_MOST_NBYTES = 64 << 10
#: Then the relay looks at what else there is: ranks may write without end.
_AT_ONCE = 256


class Batching:
    """Sends the messages of ranks, several at a time.

    Args:
        events: where to.
    """

    def __init__(self, events: zmq.Socket[bytes]) -> None:
        self._events = events
        self._waiting: list[Sequence[zmq.Frame]] = []
        self._nbytes = 0
        self._since = 0.0

    @property
    def left_seconds(self) -> float:
        """How long what waits may still wait; infinity where nothing does."""
        if not self._waiting:
            return float("inf")
        return max(0.0, self._since + TICK_SECONDS - monotonic())

    def drain(self, told: zmq.Socket[bytes]) -> None:
        """Takes all that the ranks have told by now, and sends what must not wait."""
        urgent = False
        for _ in range(_AT_ONCE):
            if not told.poll(0):
                break
            frames: list[zmq.Frame] = told.recv_multipart(copy=False)
            nbytes = sum(len(frame) for frame in frames)
            if nbytes + self._nbytes > _MOST_NBYTES:
                self.send()
                urgent = False
            self._waiting.append(frames)
            self._nbytes += nbytes
            urgent = urgent or not bytes(frames[0].buffer[:_LONGEST]).startswith(_WAITS)
        if urgent or not self.left_seconds:
            self.send()

    def send(self) -> None:
        """Sends what waits."""
        if self._waiting:
            self._events.send_multipart(join_messages(self._waiting), copy=False)
            self._waiting, self._nbytes, self._since = [], 0, monotonic()
