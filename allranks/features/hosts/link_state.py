"""What a relay's connection to the notebook has and decides: takes events, and returns commands.

It calls no clock and no socket: `allranks.features.hosts.notebook_connection` waits for the events,
and carries the commands out. Its time stands while that process stands still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from allranks.engine.host.events import TimeCame
from allranks.records import limits
from allranks.records.frozen import frozen
from allranks.records.numbered import BEGIN, Frames, ReceivedMessages, SentMessages, in_pieces


@frozen
class RelaySends:
    """A message of the relay to the notebook."""

    frames: Frames


@frozen
class NotebookSent:
    """What has come from the notebook, whose commands have numbers."""

    frames: Sequence[bytes]


@frozen
class Connected:
    """A connection has been made, and is encrypted: that of commands, or that of events."""

    of_commands: bool


@frozen
class Interrupted:
    """The connection of commands is interrupted."""


@frozen
class Refused:
    """No process listens at the notebook's port."""


Event = RelaySends | NotebookSent | Connected | Interrupted | Refused | TimeCame


@frozen
class Post:
    """Sends the notebook a message by the connection of events."""

    frames: Frames


@frozen
class Greet:
    """Announces this host by the connection of commands."""

    frames: Sequence[bytes]


@frozen
class Obey:
    """Gives the relay a command of the notebook."""

    frames: list[bytes]


@frozen
class Probe:
    """Finds out whether a process listens at the notebook's port; if none does, `Refused`."""


Command = Post | Greet | Obey | Probe


class LinkState:
    """The state of a connection. ``over`` is empty, or the reason for its end."""

    def __init__(self, host: str, lease_seconds: float, now: float) -> None:
        self.is_up = self.stays = False
        self.over = ""
        self.interrupted_seconds = min(limits.INTERRUPTED_SECONDS, lease_seconds / 3)
        self._host = host.encode()
        self._lease_seconds = lease_seconds
        self._over_at = now + lease_seconds
        self._beat_at = self._probe_at = now
        self._sent, self._received = SentMessages(), ReceivedMessages()
        #: The name of the notebook whose numbers these are; see `allranks.records.numbered`.
        self._owner = b""
        self._commands: list[Command] = []

    def apply(self, event: Event, now: float) -> list[Command]:
        self._commands = []
        match event:
            case RelaySends(frames):
                self._post(self._sent.add(frames))
            case NotebookSent(frames):
                self._take(*frames)
            case Connected(of_commands=True):
                self.is_up = True
                self._commands.append(Greet([b"%d" % self._received.last, self._owner]))
            case Connected():
                # The answer to the notebook's greeting may have been lost with the old connection.
                self._begin(self._owner)
            case Interrupted():
                if self.is_up:
                    self.is_up = False
                    self._over_at = now + self._lease_seconds - self.interrupted_seconds
            case Refused():
                self.over = self.over or "the notebook's port was closed"
            case TimeCame():
                self._look_at_time(now)
            case _:
                assert_never(event)
        return self._commands

    def _take(self, number: bytes, *frames: bytes) -> None:
        if number == BEGIN:
            self._begin(frames[0])
        elif not number:
            self._sent.confirm(int(frames[0]))
        elif self._received.accept(int(number)):
            self._commands.append(Obey([*frames]))

    def _begin(self, owner: bytes) -> None:
        if owner != self._owner:
            self._owner, self._received = owner, ReceivedMessages()
        first = b"%d" % self._sent.first_unconfirmed
        self._commands.append(Post([BEGIN, self._host, owner, first]))
        for frames in self._sent.unconfirmed():
            self._post(frames)

    def _post(self, frames: Frames) -> None:
        self._commands.append(Post([b"host", self._host, *in_pieces(frames)]))

    def _look_at_time(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + limits.BEAT_SECONDS
            last = b"%d" % self._received.last
            self._commands.append(Post([b"beat", self._host, last, self._owner]))
        if self.is_up or self.over:
            return
        if now >= self._over_at:
            self.over = f"it was interrupted for {self._lease_seconds:g} s"
        elif now >= self._probe_at and not self.stays:
            # The notebook may have ended, or its kernel was killed.
            self._probe_at = now + limits.BEAT_SECONDS
            self._commands.append(Probe())
