"""The notebook's end of the wire: listens for ranks, sends them commands.

Both sockets are encrypted with a key pair made for this cluster. Its public key is handed to the
ranks through the nursery's standard input only, so that it serves as the shared secret.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import zmq

from allranks.records.deferred import deferred
from allranks.records.wire import Record, decode, encode

Deliver = Callable[[Record, list[bytes]], None]
DeliverUnread = Callable[[Exception], None]


class Wire:
    """Sends records to ranks and delivers theirs, from a thread of its own.

    Args:
        deliver: called in that thread with every record and its payloads.
        unread: called in that thread with what kept a message from being read or delivered.
        address: where to listen.
    """

    def __init__(
        self, deliver: Deliver, unread: DeliverUnread, address: str = "tcp://127.0.0.1"
    ) -> None:
        self._deliver = deliver
        self._unread = unread
        self._context = zmq.Context()
        #: What a widget's view says may come in any thread.
        self._lock = threading.RLock()
        self._closed = False
        public, secret = zmq.curve_keypair()
        self.key = public.decode()
        self._commands = self._context.socket(zmq.ROUTER)
        self._events = self._context.socket(zmq.PULL)
        self._stop_reader = self._context.socket(zmq.PAIR)
        self._stop_reader.bind("inproc://stop")
        self._stop_writer = self._context.socket(zmq.PAIR)
        self._stop_writer.connect("inproc://stop")
        for socket in (self._commands, self._events):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.curve_server = True
            socket.curve_publickey = public
            socket.curve_secretkey = secret
        # A rank that is not there any more is an error to raise, not a message to drop.
        self._commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.commands_url = f"{address}:{self._commands.bind_to_random_port(address)}"
        self.events_url = f"{address}:{self._events.bind_to_random_port(address)}"
        self._thread = threading.Thread(target=self._read, name="allranks-events", daemon=True)
        self._thread.start()

    def send(self, ranks: Iterable[int], record: Record, *payloads: bytes) -> None:
        """Sends a record to all of these ranks; nothing where they are gone."""
        frames = encode(record, *payloads)
        # Half a message would swallow the next one.
        with deferred(), self._lock:
            for rank in ranks if not self._closed else ():
                try:
                    self._commands.send_multipart([f"rank-{rank}".encode(), *frames], copy=False)
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH:
                        raise
                    # The rank died; its parent says so, and why, on another channel.

    def _read(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._stop_reader, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._events in ready:
                frames = self._events.recv_multipart()
                try:
                    self._deliver(*decode(frames))
                except Exception as error:
                    # Without this thread no cell would ever end.
                    self._unread(error)
            elif self._stop_reader in ready:
                return

    def close(self) -> None:
        """Ends the thread and closes the sockets."""
        with self._lock:
            self._closed = True
        self._stop_writer.send(b"")
        self._thread.join()
        for socket in (self._commands, self._events, self._stop_reader, self._stop_writer):
            socket.close(0)
        self._context.term()
