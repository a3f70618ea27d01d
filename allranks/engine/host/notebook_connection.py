"""A relay's connection to the notebook, which an interruption of the network does not end.

TCP repeats what was lost after 0.2 s, 0.4 s, 0.8 s …: after an outage of 15 s it may stay silent
for another 15 s. So a connection on which nothing is acknowledged is closed, and made again; the
messages that were on the way are sent again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from allranks.countdown import Countdown
from allranks.records.config import BEAT_SECONDS, Invitation
from allranks.records.numbered import (
    BEGIN,
    Frames,
    ReceivedMessages,
    SentMessages,
    in_pieces,
)

_LINGER_MS = 1000
#: A connection is made again if nothing is acknowledged for this long.
_INTERRUPTED_SECONDS = 4.0
#: An attempt to connect that gets no answer is repeated after this time.
_CONNECT_MS = 2000
_RECONNECT_MS = 200
_PROBE_SECONDS = 0.5


class NotebookConnection:
    """Sends numbered messages to the notebook, and receives its commands.

    ``is_up`` is whether the notebook can be reached. ``over`` is empty until the connection has
    been interrupted for the lease, or the notebook has ended; then it is the reason, as text. If
    the ranks stay when the notebook ends, ``stays``, its caretaker connects in its place.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], invitation: Invitation, host: str
    ) -> None:
        self.is_up = self.stays = False
        self.over = ""
        self._url = invitation.commands_url
        self._host = host.encode()
        self._sent, self._received = SentMessages(), ReceivedMessages()
        #: The name of the notebook whose numbers these are; see `allranks.records.numbered`.
        self._owner = b""
        self._interrupted = min(_INTERRUPTED_SECONDS, invitation.lease_seconds / 3)
        self._lease_seconds = invitation.lease_seconds
        self._lease = Countdown(self._lease_seconds)
        self._next_beat = self._next_probe = 0.0
        self._commands = context.socket(zmq.DEALER)
        self._commands.setsockopt(zmq.IDENTITY, self._host)
        self._events = context.socket(zmq.PUSH)
        public, secret = zmq.curve_keypair()
        # Only here: the other connection carries the beats, and TCP notices if they do not arrive.
        self._commands.setsockopt(zmq.HEARTBEAT_IVL, int(BEAT_SECONDS * 1000))
        # Counted from a ping; the first one comes up to a beat later.
        patience_ms = int((invitation.lease_seconds - BEAT_SECONDS) * 1000)
        self._commands.setsockopt(zmq.HEARTBEAT_TIMEOUT, patience_ms)
        self._monitors = []
        for one, url in (
            (self._commands, invitation.commands_url),
            (self._events, invitation.events_url),
        ):
            one.setsockopt(zmq.SNDHWM, 0)
            one.setsockopt(zmq.RCVHWM, 0)
            one.setsockopt(zmq.LINGER, _LINGER_MS)
            one.setsockopt(zmq.IPV6, "[" in url)
            # Bytes, not messages: a large message may take long.
            one.setsockopt(zmq.TCP_MAXRT, int(self._interrupted * 1000))
            one.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
            # By default 30 s: a connection that nobody serves would outlast the lease.
            one.setsockopt(zmq.HANDSHAKE_IVL, int(self._interrupted * 1000))
            one.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            one.curve_serverkey = invitation.wire_key.encode()
            one.curve_publickey = public
            one.curve_secretkey = secret
            self._monitors.append(
                one.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            )
            one.connect(url)

    def sources(self) -> tuple[zmq.Socket[bytes], ...]:
        """Returns what to poll; `serve` handles each."""
        return (self._commands, *self._monitors)

    def send(self, frames: Frames) -> None:
        self._post(self._sent.add(frames))

    def serve(self, source: Any) -> Iterator[list[bytes]]:
        """Handles a source that has something; yields a command of the notebook."""
        if source is self._commands:
            number, *frames = self._commands.recv_multipart()
            if number == BEGIN:
                self._begin(frames[0])
            elif not number:
                self._sent.confirm(int(frames[0]))
            elif self._received.accept(int(number)):
                yield frames
        elif recv_monitor_message(source)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._resume(source)
        elif source is self._monitors[0] and self.is_up:
            self.is_up = False
            self._lease = Countdown(self._lease_seconds - self._interrupted)

    def _begin(self, owner: bytes) -> None:
        if owner != self._owner:
            self._owner, self._received = owner, ReceivedMessages()
        first = b"%d" % self._sent.first_unconfirmed
        self._events.send_multipart([BEGIN, self._host, owner, first])
        self._post_again()

    def _resume(self, source: Any) -> None:
        if source is self._monitors[0]:
            self.is_up = True
            self._commands.send_multipart([b"%d" % self._received.last, self._owner])
        else:
            # The answer to the notebook's greeting may have been lost with the old connection.
            self._begin(self._owner)

    def _post_again(self) -> None:
        for frames in self._sent.unconfirmed():
            self._post(frames)

    def _post(self, frames: Frames) -> None:
        self._events.send_multipart([b"host", self._host, *in_pieces(frames)], copy=False)

    def tick(self) -> None:
        """Sends a heartbeat when it is due, and finds out whether the connection is over."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            last = b"%d" % self._received.last
            self._events.send_multipart([b"beat", self._host, last, self._owner])
        if not self.is_up and not self.over:
            # A handshake that has succeeded may not be read yet.
            if self._lease.left() <= 0 and not self._monitors[0].poll(0):
                self.over = f"it was interrupted for {self._lease_seconds:g} s"
            elif now >= self._next_probe:
                self._next_probe = now + BEAT_SECONDS
                if not self.stays and self._is_refused():
                    self.over = "the notebook's port was closed"

    def _is_refused(self) -> bool:
        # The notebook has ended, or its kernel was killed.
        found = urlsplit(self._url)
        try:
            socket.create_connection((found.hostname, found.port), _PROBE_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass  # the network is interrupted
        return False
