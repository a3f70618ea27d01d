"""Numbered messages between a host and the notebook, so that none is lost with a connection.

ZeroMQ connects again by itself, but messages that were on the way are lost. Therefore each side
keeps what it has sent until the other side has confirmed it, and sends it again on a new
connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

#: Bytes, or ZeroMQ's frames.
Frames = Sequence[Any]


class SentMessages:
    """The messages of one direction that are not confirmed yet."""

    def __init__(self) -> None:
        self._last = 0
        self._kept: deque[tuple[int, Frames]] = deque()

    def add(self, frames: Frames) -> Frames:
        """Returns the message with its number as first frame."""
        self._last += 1
        message = [b"%d" % self._last, *frames]
        self._kept.append((self._last, message))
        return message

    def confirm(self, number: int) -> None:
        """Drops the messages up to this number: the other side has them."""
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def unconfirmed(self) -> list[Frames]:
        return [message for _, message in self._kept]


class ReceivedMessages:
    """Accepts each message of one direction once, and all in order."""

    last = 0

    def accept(self, number: int) -> bool:
        """Returns whether this is the next message. Others are repeated, or are sent again."""
        if number != self.last + 1:
            return False
        self.last = number
        return True
