"""A relay's connection to the notebook, which an interruption of the network does not end.

TCP repeats what was lost after 0.2 s, 0.4 s, 0.8 s …: after an outage of 15 s it may stay silent
for another 15 s. So a connection on which nothing is acknowledged is closed, and made again; the
messages that were on the way are sent again. `allranks.features.hosts.link_state` decides that.
"""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from allranks.countdown import AwakeClock
from allranks.engine.host.events import TimeCame
from allranks.features.hosts.link_state import (
    Connected,
    Event,
    Greet,
    Interrupted,
    LinkState,
    NotebookSent,
    Obey,
    Post,
    Probe,
    Refused,
    RelaySends,
)
from allranks.records import limits
from allranks.records.config import Invitation
from allranks.records.numbered import Frames

_LINGER_MS = 1000
#: An attempt to connect that gets no answer is repeated after this time.
_CONNECT_MS = 2000
_RECONNECT_MS = 200
_PROBE_SECONDS = 0.5


class NotebookConnection:
    """Sends numbered messages to the notebook, and receives its commands.

    ``state.is_up`` is whether the notebook can be reached. ``state.over`` is empty until the
    connection has been interrupted for the lease, or the notebook has ended; then it is the reason,
    as text. If the ranks stay when the notebook ends, ``state.stays``, its caretaker connects in
    its place.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], invitation: Invitation, host: str
    ) -> None:
        self._clock = AwakeClock()
        self.state = LinkState(host, invitation.lease_seconds, self._clock.now())
        self._url = invitation.commands_url
        self._commands = context.socket(zmq.DEALER)
        self._commands.setsockopt(zmq.IDENTITY, host.encode())
        self._events = context.socket(zmq.PUSH)
        public, secret = zmq.curve_keypair()
        # Only here: the other connection carries the beats, and TCP notices if they do not arrive.
        self._commands.setsockopt(zmq.HEARTBEAT_IVL, int(limits.BEAT_SECONDS * 1000))
        # Counted from a ping; the first one comes up to a beat later.
        patience_ms = int((invitation.lease_seconds - limits.BEAT_SECONDS) * 1000)
        self._commands.setsockopt(zmq.HEARTBEAT_TIMEOUT, patience_ms)
        interrupted_ms = int(self.state.interrupted_seconds * 1000)
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
            one.setsockopt(zmq.TCP_MAXRT, interrupted_ms)
            one.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
            # By default 30 s: a connection that no process serves would outlast the lease.
            one.setsockopt(zmq.HANDSHAKE_IVL, interrupted_ms)
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
        self._feed(RelaySends(frames))

    def serve(self, source: Any) -> list[list[bytes]]:
        """Handles a source that has something; returns the commands of the notebook."""
        if source is self._commands:
            return self._feed(NotebookSent(self._commands.recv_multipart()))
        of_commands = source is self._monitors[0]
        if recv_monitor_message(source)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return self._feed(Connected(of_commands))
        return self._feed(Interrupted()) if of_commands else []

    def tick(self) -> None:
        """Sends a heartbeat when it is due, and finds out whether the connection is over."""
        # First, a connection that was made while this process stood still.
        while self._monitors[0].poll(0):
            self.serve(self._monitors[0])
        self._feed(TimeCame())

    def _feed(self, event: Event) -> list[list[bytes]]:
        obeyed: list[list[bytes]] = []
        for command in self.state.apply(event, self._clock.now()):
            match command:
                case Post(frames):
                    self._events.send_multipart(frames, copy=False)
                case Greet(frames):
                    self._commands.send_multipart(frames)
                case Obey(frames):
                    obeyed.append(frames)
                case Probe():
                    if self._is_refused():
                        self._feed(Refused())
                case _:
                    raise ValueError(f"expected a command of the state, found {command!r:.200}")
        return obeyed

    def _is_refused(self) -> bool:
        found = urlsplit(self._url)
        try:
            socket.create_connection((found.hostname, found.port), _PROBE_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass  # the network is interrupted
        return False
