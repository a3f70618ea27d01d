"""The connection to the ranks: sockets, the queue of their messages, and their answers.

Both sockets are encrypted with a key pair made for this cluster. Only the host agent gets its
public key, through its standard input, and passes it to the ranks, so it serves as the shared
secret. The ranks of another host are reached through that host's relay
(`allranks.engine.host.relay`). Ranks that another notebook started connect to sockets in their
session's folder, which only this user may enter.
"""

from __future__ import annotations

import asyncio
import json
import queue
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import zmq

from allranks.cluster.sharing import STATE, WatcherFeed
from allranks.errors import StartFailed
from allranks.records.config import BEAT_SECONDS, COMMANDS_AT_HOME, EVENTS_AT_HOME, LIMIT_SECONDS
from allranks.records.deferred import deferred
from allranks.records.wire import Answer, Ask, Record, decode, encode, split_messages


@dataclass(frozen=True)
class FromRank:
    """A record that a rank sent, and its payloads."""

    record: Record
    payloads: list[bytes]


@dataclass(frozen=True)
class FromHostAgent:
    """An event of a host agent."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class InterruptRequested:
    """The user interrupted the notebook's kernel."""


@dataclass(frozen=True)
class Unreadable:
    """A message of a rank that could not be read."""

    problem: Exception


Event = FromRank | FromHostAgent | InterruptRequested | Unreadable


class EventQueue:
    """The queue of one cluster's events."""

    def __init__(self) -> None:
        # Its put() may be called from a signal handler; queue.Queue's may not.
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def put(self, event: Event) -> None:
        """Adds an event, from any thread and from signal handlers."""
        self._queue.put(event)
        wake = self._wake
        if wake is not None:
            wake()

    def wait(self, seconds: float) -> list[Event]:
        """Returns the events so far, or else the first within ``seconds``."""
        events: list[Event] = []
        try:
            events.append(
                self._queue.get(timeout=seconds) if seconds > 0 else self._queue.get_nowait()
            )
            while True:
                events.append(self._queue.get_nowait())
        except queue.Empty:
            return events

    @contextmanager
    def waking(self) -> Iterator[Callable[[float], Awaitable[None]]]:
        """Within, a coroutine can await the next event, with a time limit in seconds."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()

        async def next_event(seconds: float) -> None:
            try:
                await asyncio.wait_for(came.wait(), seconds)
            except TimeoutError:
                pass  # an interrupt does not wake a sleeping loop: the caller looks again
            except asyncio.CancelledError:
                # The kernel's own handler turns an interrupt into a cancelled task.
                task = asyncio.current_task()
                if task is not None:
                    task.uncancel()
                self.put(InterruptRequested())
            came.clear()

        def wake() -> None:
            with suppress(RuntimeError):  # the kernel is ending: its loop is closed already
                loop.call_soon_threadsafe(came.set)

        self._wake = wake
        if not self._queue.empty():
            came.set()
        try:
            yield next_event
        finally:
            self._wake = None

    @contextmanager
    def hearing_interrupts(self) -> Iterator[None]:
        """Within, SIGINT of this process goes to the queue instead of being raised."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def pressed(_signal: int, _frame: FrameType | None) -> None:
            self.put(InterruptRequested())

        before = signal.signal(signal.SIGINT, pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


Answers = dict[int, tuple[dict[str, Any], list[bytes]]]
"""By rank, what it answered, and the payloads of that."""
AnswersSoFar = dict[int, tuple[Answer, list[bytes]]]
"""What has been answered so far: by which rank, and what came with it."""
DeliverAnswer = Callable[[Answer], None]


class PendingRequests:
    """The unanswered requests of one notebook; ``last`` precedes the first number."""

    def __init__(self, last: int = 0) -> None:
        self._last = last
        self._open: dict[int, AnswersSoFar] = {}
        self._delivers: dict[int, DeliverAnswer] = {}

    @contextmanager
    def awaited(self, name: str, arguments: dict[str, Any]) -> Iterator[tuple[Ask, AnswersSoFar]]:
        """Yields a request to send; within, its answers are there as they come."""
        ask, got = self._new(name, arguments), AnswersSoFar()
        self._open[ask.request] = got
        try:
            yield ask, got
        finally:
            del self._open[ask.request]

    def delivered(self, name: str, arguments: dict[str, Any], deliver: DeliverAnswer) -> Ask:
        """Returns a request to send; each answer to it goes to ``deliver``."""
        ask = self._new(name, arguments)
        self._delivers[ask.request] = deliver
        return ask

    def take(self, answer: Answer, payloads: list[bytes]) -> None:
        # An answer that comes too late is dropped.
        if answer.request in self._open:
            self._open[answer.request][answer.rank] = (answer, payloads)
        elif answer.request in self._delivers:
            self._delivers[answer.request](answer)

    def _new(self, name: str, arguments: dict[str, Any]) -> Ask:
        self._last += 1
        return Ask(self._last, name, arguments)


Deliver = Callable[[Record, list[bytes]], None]
DeliverUnread = Callable[[Exception], None]
DeliverHost = Callable[[str, bytes], None]
_LOOK_SECONDS = BEAT_SECONDS / 2
_LOOKS = int(LIMIT_SECONDS / _LOOK_SECONDS)
"""A host is lost after this many polls without a heartbeat. Polls, not seconds,
because this process may have been suspended: heartbeats sent meanwhile are read before the next
poll."""
_SILENT = json.dumps({"event": "host_silent"}).encode()


class Wire:
    """Sends records to ranks and delivers theirs, from a thread of its own.

    That thread calls ``deliver`` with every record and its payloads, and ``unread`` with the
    problem of a message that it cannot read or deliver. ``ports`` are the lowest and the highest
    port to listen on; ``home`` is the session's folder of another notebook's ranks.
    """

    def __init__(
        self,
        deliver: Deliver,
        unread: DeliverUnread,
        address: str,
        ports: tuple[int, int],
        home: str = "",
    ) -> None:
        self._deliver = deliver
        self._unread = unread
        #: Called in the wire's thread with each line of a host's agent or relay.
        self.deliver_host: DeliverHost = lambda host, line: None
        self._host_of: Mapping[int, str] = {}
        #: The number of the poll at which each host last sent something.
        self._heard: dict[str, int] = {}
        self._looks, self._next_look = 0, 0.0
        #: Sends messages to the notebooks that watch this one.
        self.sharing = WatcherFeed()
        self._context = zmq.Context()
        #: Messages of widgets' views come in any thread.
        self._lock = threading.RLock()
        self._closed = False
        public, secret = zmq.curve_keypair()
        self.key = "" if home else public.decode()
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
            if self.key:
                socket.curve_server = True
                socket.curve_publickey = public
                socket.curve_secretkey = secret
        # A message to a rank that has ended raises instead of being dropped.
        self._commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A replacement has the name of the dead rank.
        self._commands.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if home:
            self.commands_url = COMMANDS_AT_HOME.format(home)
            self.events_url = EVENTS_AT_HOME.format(home)
            self._commands.bind(self.commands_url)
            self._events.bind(self.events_url)
        else:
            self.commands_url, self.events_url = (
                _listen(socket, f"tcp://{address}", *ports)
                for socket in (self._commands, self._events)
            )
        self._thread = threading.Thread(target=self._read, name="allranks-events", daemon=True)
        self._thread.start()

    def send(self, ranks: Iterable[int], record: Record, *payloads: bytes) -> bool:
        """Sends a record to all of these ranks; returns whether all were connected."""
        frames = encode(record, *payloads)
        # Half a message would swallow the next one.
        with deferred(), self._lock:
            self.sharing.take(record, frames)
            sent = [self._send([*way, *frames]) for way in self._ways(ranks)]
        return all(sent)

    def say(self, host: str, word: str, line: str) -> None:
        """Sends a command to a host's relay; drops it if the relay has ended."""
        with deferred(), self._lock:
            self._send([host.encode(), word.encode(), line.encode()])

    def reach(self, host_of: Mapping[int, str]) -> None:
        """From now on messages to a rank go through the relay of its host."""
        self._host_of = host_of

    def forget(self, host: str) -> None:
        """Accepts that a host sends nothing any longer."""
        self._heard.pop(host, None)

    def _ways(self, ranks: Iterable[int]) -> Iterator[list[bytes]]:
        """The prefix of a message to ranks: one of all ranks that are on the same host."""
        if not self._host_of:
            yield from ([f"rank-{rank}".encode()] for rank in ranks)
            return
        groups: dict[str, list[int]] = {}
        for rank in ranks:
            groups.setdefault(self._host_of[rank], []).append(rank)
        for host, there in groups.items():
            yield [host.encode(), b"ranks", json.dumps(there).encode()]

    def _send(self, frames: list[bytes]) -> bool:
        if self._closed:
            return False
        try:
            self._commands.send_multipart(frames, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The rank died; its host agent reports that on another channel.
            return False
        return True

    def _read(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._stop_reader, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(_LOOK_SECONDS * 1000) if self._heard else None))
            try:
                if self._events in ready:
                    self._take(self._events.recv_multipart())
                elif self._stop_reader in ready:
                    return
                if self._heard and time.monotonic() >= self._next_look:
                    self._look_for_silence()
            except Exception as error:
                # Without this thread no cell would ever end.
                self._unread(error)

    def _take(self, frames: list[bytes]) -> None:
        if frames[0] == b"beat":
            self._hear(frames[1].decode())
        elif frames[0] == b"nursery":
            self._hear(frames[1].decode())
            self.deliver_host(frames[1].decode(), frames[2])
        else:
            for message in split_messages(frames):
                try:
                    record, payloads = decode(message)
                    if self.sharing.listens or isinstance(record, STATE):
                        self.sharing.take(record, message)
                    self._deliver(record, payloads)
                except Exception as error:
                    self._unread(error)  # the other ranks' are handled all the same

    def _hear(self, host: str) -> None:
        self._heard[host] = self._looks

    def _look_for_silence(self) -> None:
        self._next_look = time.monotonic() + _LOOK_SECONDS
        self._looks += 1
        for host, at in list(self._heard.items()):  # another thread may forget one meanwhile
            if self._looks - at > _LOOKS:
                self.forget(host)
                self.deliver_host(host, _SILENT)

    def close(self) -> None:
        self.sharing.close()
        with self._lock:
            self._closed = True
        self._stop_writer.send(b"")
        self._thread.join()
        for socket in (self._commands, self._events, self._stop_reader, self._stop_writer):
            socket.close(0)
        self._context.term()


def _listen(socket: zmq.Socket[bytes], address: str, lowest: int, highest: int) -> str:
    try:
        return f"{address}:{socket.bind_to_random_port(address, lowest, highest + 1)}"
    except zmq.error.ZMQBaseError as error:
        raise StartFailed(
            f"expected a free port between {lowest} and {highest} at {address}, found {error}. "
            "Set ALLRANKS_PORTS to others, and ALLRANKS_ADDRESS to an address of this machine"
        ) from error
