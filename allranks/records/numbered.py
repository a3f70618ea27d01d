"""Numbered messages between a host and the notebook, so that none is lost with a connection.

ZeroMQ connects again by itself, but messages that were on the way are lost. Therefore each side
keeps what it has sent until the other side has confirmed it, and sends it again on a new
connection.

A host sends a large frame in pieces. So the notebook can refuse frames that are larger, also on a
connection that is not encrypted yet: that one may be anyone's.

A notebook that gets the ranks of another one counts from 1 again. Its messages begin with a name,
its own, which the host repeats: what came before concerned another notebook.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

#: Bytes, or ZeroMQ's frames.
Frames = Sequence[Any]

#: A connection that is not encrypted after this time is closed; a host makes it again.
HANDSHAKE_MS = 5000
#: A frame of this size is continued by the next one.
PIECE_NBYTES = 64 << 10
#: The largest frame that the notebook accepts. Encryption (CurveZMQ) adds 33 bytes.
ENCRYPTED_PIECE_NBYTES = PIECE_NBYTES + 33


def in_pieces(frames: Frames) -> Frames:
    """Returns a message without large frames, of which `whole` makes these again."""
    if all(len(frame) < PIECE_NBYTES for frame in frames):
        return frames
    return [piece for frame in frames for piece in _pieces(_bytes_of(frame))]


def _pieces(data: memoryview) -> Iterator[memoryview]:
    # The last piece is a smaller one, if need be an empty one.
    for at in range(0, len(data) + 1, PIECE_NBYTES):
        yield data[at : at + PIECE_NBYTES]


def _bytes_of(frame: Any) -> memoryview:
    return memoryview(frame if isinstance(frame, bytes) else frame.buffer)


def whole(pieces: Frames) -> list[bytes]:
    """Returns the frames that `in_pieces` was given."""
    frames: list[bytes] = []
    parts: list[memoryview] = []
    for piece in pieces:
        parts.append(_bytes_of(piece))
        if len(piece) < PIECE_NBYTES:
            frames.append(b"".join(parts))
            parts.clear()
    return frames


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

    @property
    def first_unconfirmed(self) -> int:
        """The number of the first of them, or of the next message."""
        return self._last + 1 - len(self._kept)


class ReceivedMessages:
    """Accepts each message of one direction once, and all in order."""

    last = 0

    def accept(self, number: int) -> bool:
        """Returns whether this is the next message. Others are repeated, or are sent again."""
        if number != self.last + 1:
            return False
        self.last = number
        return True


#: Begins the numbers of another notebook, whose name follows.
BEGIN = b"begin"


class HostMessages:
    """The notebook's end of the numbered messages with one host.

    ``owner`` names a notebook, or its caretaker, that has taken over the ranks; empty for the one
    that has started them.
    """

    def __init__(self, owner: bytes = b"") -> None:
        self._owner = owner
        self._sent, self._received = SentMessages(), ReceivedMessages()
        #: Whether the host has named its first message to this owner.
        self._begun = not owner

    def add(self, frames: Frames) -> Frames:
        return self._sent.add(frames)

    def accept(self, number: int) -> bool:
        return self._begun and self._received.accept(number)

    def begin(self, owner: bytes, first: int) -> None:
        """Takes a host's answer to `BEGIN`: ``first`` is the number of its next message."""
        if owner == self._owner and not self._begun:
            self._received.last, self._begun = first - 1, True

    def on_connection(self, last: int, owner: bytes) -> list[Frames]:
        """Returns what a host gets on a new connection; ``last`` is the last that it has got."""
        self.confirm(last, owner)
        begin = [] if owner == self._owner else [[BEGIN, self._owner]]
        return [*begin, *self._sent.unconfirmed()]

    def confirm(self, last: int, owner: bytes) -> None:
        if owner == self._owner:
            self._sent.confirm(last)

    @property
    def confirmation(self) -> Frames | None:
        """What confirms the host's messages; None before the first."""
        return [b"", b"%d" % self._received.last] if self._begun else None
