"""The sockets of one process of a script, commanded one call at a time.

The same code serves real ZeroMQ and its model: `Sockets` gets the module. As a program, this file
is the process from which the processes of scripts on real ZeroMQ are forked:

    python -m tests.simulated.zeromq_sockets DESCRIPTOR
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

#: What the control plane sets on all its sockets; a script can set others.
USUAL = {"LINGER": 0, "SNDHWM": 0, "RCVHWM": 0, "RECONNECT_IVL": 20}
EVENTS = (
    "HANDSHAKE_SUCCEEDED",
    "DISCONNECTED",
    "CLOSED",
    "HANDSHAKE_FAILED_NO_DETAIL",
    "HANDSHAKE_FAILED_PROTOCOL",
    "HANDSHAKE_FAILED_AUTH",
)


class Sockets:
    """Sockets by number. ``zmq`` is the module, ``read_event`` its reader of monitors."""

    def __init__(self, zmq: Any, read_event: Any, descriptors: dict[str, int]) -> None:
        self._zmq, self._read_event = zmq, read_event
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        self._monitors: dict[int, Any] = {}
        self._descriptors = descriptors

    def call(self, name: str, *arguments: Any) -> tuple[str, Any]:
        """Calls a method; returns ``"done"`` and what it returned, or ``"refused"`` and the name
        of the error's number.
        """
        try:
            return "done", getattr(self, name)(*arguments)
        except self._zmq.ZMQError as error:
            return "refused", errno.errorcode[error.errno]

    def open(self, kind: str, options: dict[str, Any], events: tuple[str, ...]) -> int:
        zmq = self._zmq
        made = self._context.socket(getattr(zmq, kind))
        for name, value in {**USUAL, **options}.items():
            if name == "USE_FD":
                value = self._descriptors[value]
            made.setsockopt(getattr(zmq, name), value)
        self._sockets.append(made)
        if events:
            mask = 0
            for name in events:
                mask |= getattr(zmq, f"EVENT_{name}")
            self._monitors[len(self._sockets) - 1] = made.get_monitor_socket(mask)
        return len(self._sockets) - 1

    def bind(self, number: int, url: str) -> None:
        self._sockets[number].bind(url)

    def connect(self, number: int, url: str) -> None:
        self._sockets[number].connect(url)

    def send(self, number: int, frames: list[bytes], flags: str = "") -> None:
        more = {"flags": getattr(self._zmq, flags)} if flags else {}
        self._sockets[number].send_multipart(frames, **more)

    def send_all(self, number: int, messages: list[list[bytes]], flags: str = "") -> None:
        for frames in messages:
            self.send(number, frames, flags)

    def receive(self, number: int, milliseconds: int, most: int) -> list[list[bytes]]:
        """Returns so many messages, or those that come in time."""
        found: list[list[bytes]] = []
        while len(found) < most and self._sockets[number].poll(milliseconds):
            found.append([bytes(frame) for frame in self._sockets[number].recv_multipart()])
        return found

    def receive_now(self, number: int) -> list[bytes]:
        return list(self._sockets[number].recv_multipart(flags=self._zmq.NOBLOCK))

    def event(self, number: int, milliseconds: int) -> str | None:
        """Returns the name of the next event of a socket; None if none comes in time."""
        if not self._monitors[number].poll(milliseconds):
            return None
        found = self._read_event(self._monitors[number])["event"]
        names = [
            name for name in ("CONNECTED", *EVENTS) if getattr(self._zmq, f"EVENT_{name}") == found
        ]
        return names[0] if names else str(found)

    def stop_monitor(self, number: int) -> None:
        self._sockets[number].disable_monitor()
        self._monitors.pop(number).close(0)

    def ready(self, numbers: list[int], milliseconds: int) -> list[int]:
        """Returns which of these sockets have a message, as one poller finds them."""
        poller = self._zmq.Poller()
        for number in numbers:
            poller.register(self._sockets[number], self._zmq.POLLIN)
        found = [item for item, _ in poller.poll(milliseconds)]
        return [number for number in numbers if self._sockets[number] in found]

    def close(self, number: int, linger: int) -> None:
        self._sockets[number].close(linger)

    def destroy(self, linger: int) -> None:
        """Closes all sockets, and waits until nothing is left to send."""
        self._context.destroy(linger)


def _serve(control: Connection, descriptors: dict[str, int]) -> None:
    import zmq
    from zmq.utils.monitor import recv_monitor_message

    sockets = Sockets(zmq, recv_monitor_message, descriptors)
    while True:
        try:
            asked = control.recv()
        except EOFError:
            os._exit(0)
        control.send(sockets.call(*asked))


def main(number: int) -> None:
    """Forks a process for each message on this socket, and answers with its number."""
    import zmq.utils.monitor  # noqa: F401  # once, for all of them

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that none is left to be waited for
    door = socket.socket(fileno=number)
    while True:
        names, descriptors, *_ = socket.recv_fds(door, 4096, 16)
        if not names:
            return
        pid = os.fork()
        if not pid:
            door.close()
            control, *listening = descriptors
            named = dict(zip(names.decode().split(",")[1:], listening, strict=True))
            _serve(Connection(control), named)
        for descriptor in descriptors:
            os.close(descriptor)
        door.sendall(pid.to_bytes(8, "little"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
