"""The sockets between the notebook and its ranks, and the queue of what comes from them.

Ranks on this machine connect to sockets in their session's folder, which only this user may enter.
The ranks of another host are reached through that host's relay (`allranks.relay`): these
connections are encrypted with a key pair made for this cluster. Only the relays get its
public key, so it serves as the shared secret.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import queue
import random
import secrets
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat, starmap
from typing import Any, Protocol

import zmq

from allranks.cluster.failures import ProcessExit
from allranks.countdown import AwakeClock
from allranks.errors import StartFailed, WireError
from allranks.records import agent, limits
from allranks.records.agent import HostBeat, HostLate, HostSilent, to_line
from allranks.records.config import family_of, tcp_url
from allranks.records.deferred import deferred, interrupts_to
from allranks.records.numbered import (
    BEGIN,
    ENCRYPTED_PIECE_NBYTES,
    HANDSHAKE_MS,
    Frames,
    HostMessages,
    whole,
)
from allranks.records.wire import (
    SENDERS,
    Answer,
    Record,
    decode_all,
    encode,
    process_of,
    read_senders,
)


@dataclass(frozen=True)
class FromRank:
    """A record that a rank sent, and its payloads."""

    record: Record
    payloads: list[bytes]


@dataclass(frozen=True)
class FromHostAgent:
    """An event of a host agent; ``host`` is empty on this machine alone."""

    event: agent.Event
    host: str = ""


@dataclass(frozen=True)
class InterruptRequested:
    """The user interrupted the notebook's kernel."""


@dataclass(frozen=True)
class ClientAnswered:
    """A client has the answer to a request."""


@dataclass(frozen=True)
class DeathsKnown:
    """Ranks have died, and the others have been told; ``shown``: the cell that runs is to show it,
    because others are left.
    """

    ends: tuple[ProcessExit, ...]
    shown: bool


#: An exception is that of a message of a rank that could not be read, or a StartFailed.
Event = FromRank | FromHostAgent | DeathsKnown | InterruptRequested | ClientAnswered | Exception


class Inbox(Protocol):
    """Gets what comes from the ranks."""

    def put(self, event: Event) -> None:
        """Takes an event, in the thread that receives."""


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
        events = deque[Event]()
        self.move(events, seconds)
        return [*events]

    def move(self, events: deque[Event], seconds: float) -> None:
        """Adds to ``events`` those so far, or else the first within ``seconds``.

        In calls of C, between which no event is held: an interrupt loses none.
        """
        with suppress(queue.Empty):
            if seconds > 0:
                events.extend(starmap(partial(self._queue.get, timeout=seconds), ((),)))
            events.extend(starmap(self._queue.get_nowait, repeat(())))

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

    def hearing_interrupts(self) -> AbstractContextManager[None]:
        """Within, SIGINT of this process goes to the queue instead of being raised."""
        return interrupts_to(lambda *_: self.put(InterruptRequested()))


#: The content of each rank's answer, and its payloads.
Answers = dict[int, tuple[dict[str, Any], list[bytes]]]
DeliverAnswer = Callable[[Answer], None]

DeliverHost = Callable[[str, bytes], None]


class Interceptors(Protocol):
    """The features that get records before the queue does."""

    def receive(self, record: Record, payloads: list[bytes]) -> Record | None:
        """Returns what goes to the queue, if anything."""


class RecordObserver(Protocol):
    """Gets what is sent to ranks and what comes from them, before any feature changes it."""

    @property
    def records(self) -> tuple[type[Record], ...]:
        """The kinds of records that it gets."""

    def take(self, record: Record, frames: Frames) -> None:
        """Gets a record and its message, in any thread."""

    def close(self) -> None:
        """The sockets are about to be closed."""


_LOOK_SECONDS = limits.BEAT_SECONDS / 2
_TRIED_PORTS = 100
#: For calls that are posted already: none of them waits.
_SETTLE_SECONDS = 10.0
#: ZeroMQ's own names of connections begin with it.
_NO_NAME = b"\0"
_SILENT = to_line(HostSilent())
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 6,
}
_LATE, _BEAT = to_line(HostLate()), to_line(HostBeat())


class ListeningSockets:
    """The sockets on which a notebook listens for other hosts, and the keys of the connections.

    The descriptors belong to this object; its ranks' next notebook, which gets them from the
    caretaker with the ``keys``, has an ``owner``, a name for its numbers.
    """

    def __init__(self, descriptors: Sequence[int], keys: tuple[str, str], owner: str = "") -> None:
        self.key, self.secret_key = keys
        self.owner = owner.encode()
        self.commands, self.events = descriptors

    @classmethod
    def open(cls, address: str, ports: tuple[int, int]) -> ListeningSockets:
        public, secret = zmq.curve_keypair()
        with ExitStack() as opened:
            sockets = [opened.enter_context(_listening(address, *ports)) for _ in range(2)]
            return cls([one.detach() for one in sockets], (public.decode(), secret.decode()))

    @classmethod
    def taken(cls, descriptors: Sequence[int], keys: tuple[str, str]) -> ListeningSockets:
        return cls(descriptors, keys, secrets.token_hex(8))

    def urls(self) -> tuple[str, str]:
        commands, events = map(_url_of, (self.commands, self.events))
        return commands, events

    def give(self, commands: zmq.Socket[bytes], events: zmq.Socket[bytes]) -> None:
        """Prepares ZeroMQ's sockets to listen there, for hosts that have the key."""
        for one, descriptor in ((commands, self.commands), (events, self.events)):
            one.setsockopt(zmq.USE_FD, os.dup(descriptor))
            one.setsockopt(zmq.IPV6, "[" in _url_of(descriptor))
            # A relay that makes a new connection leaves the old one, on which nothing is sent.
            for option, value in _KEEPALIVE.items():
                one.setsockopt(option, value)
            # Before a connection is encrypted, it may be anyone's.
            one.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            one.setsockopt(zmq.MAXMSGSIZE, ENCRYPTED_PIECE_NBYTES)
            one.curve_server = True
            one.curve_publickey = self.key.encode()
            one.curve_secretkey = self.secret_key.encode()

    def close(self) -> None:
        for descriptor in (self.commands, self.events):
            os.close(descriptor)


class RankSockets:
    """Sends records to ranks; after `listen`, a thread of its own receives theirs.

    They go to ``inbox``; features get some of them first, through ``hooks``. Another thread can
    have that thread call something (`post`), from `start` on. ``place`` is two URLs
    in the session's folder, or for several hosts the sockets that listen. A host that sends nothing
    for ``lease_seconds`` counts as lost.
    """

    def __init__(
        self,
        inbox: Inbox,
        hooks: Interceptors,
        place: ListeningSockets | tuple[str, str],
        lease_seconds: float = limits.LEASE_SECONDS,
    ) -> None:
        self._inbox = inbox
        self._hooks = hooks
        #: Called in that thread with each line of a host's agent or relay.
        self.deliver_host: DeliverHost = lambda host, line: None
        #: The host whose relay passes messages to a rank on; empty on this machine alone.
        self.host_of: Mapping[int, str] = {}
        self.lease_seconds = lease_seconds
        self.listening = place if isinstance(place, ListeningSockets) else None
        self._hosts: dict[str, HostMessages] = {}
        #: When each host last sent something; None once it has ended.
        self._last_signs: dict[str, float | None] = {}
        #: Hosts whose records are still for the last notebook.
        self._of_last_notebook: set[str] = set()
        #: A heartbeat that came while this process stood still is read late: that time must not
        #: count. ``_now`` is the clock's time at the last message or look, 0 on this machine alone.
        self._clock = AwakeClock()
        self._now = self._next_look = 0.0
        #: A frame of the last message: its process is looked up only for an error.
        self._last: Any = None
        self.observers: list[RecordObserver] = []
        try:
            _expect_threads()
        except StartFailed:
            if self.listening is not None:
                self.listening.close()
            raise
        self._context = zmq.Context()
        #: For what is sent, and for what it follows from. Only one thread at a time may use the
        #: socket of commands, and messages to hosts are sent in the order of their numbers.
        #: Features send in any thread, as messages of widgets' views; the thread below confirms
        #: what has come. `Driver` changes the state of the ranks with it: ranks hear of a death
        #: before the commands of a thread that already knows of it.
        self.lock = threading.RLock()
        self._closed = False
        self._posted: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._commands = self._context.socket(zmq.ROUTER)
        self._events = self._context.socket(zmq.PULL)
        self._wake_reader = self._context.socket(zmq.PAIR)
        self._wake_writer = self._context.socket(zmq.PAIR)
        for one in (self._commands, self._events, self._wake_reader, self._wake_writer):
            # Messages to ranks that have ended must not keep the kernel from exiting.
            one.setsockopt(zmq.LINGER, 0)
            # No limits: above one, a socket drops messages or blocks the sender.
            one.setsockopt(zmq.SNDHWM, 0)
            one.setsockopt(zmq.RCVHWM, 0)
        self._wake_reader.bind("inproc://wake")
        self._wake_writer.connect("inproc://wake")
        # A message to a rank that has ended raises instead of being dropped.
        self._commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A replacement has the name of the dead rank.
        self._commands.setsockopt(zmq.ROUTER_HANDOVER, 1)
        #: The public key for the relays; empty on this machine alone.
        self.key = ""
        if isinstance(place, ListeningSockets):
            self.key = place.key
            self.commands_url, self.events_url = place.urls()
        else:
            self.commands_url, self.events_url = place
        self._thread = threading.Thread(target=self._read, name="allranks-events", daemon=True)

    def listen(self) -> None:
        """Begins to listen, unless closed; the session's folder must be there. Once the thread of
        the sockets has started, only that one may call it.
        """
        with self.lock:
            if self._closed:
                return
            if self.listening is not None:
                self.listening.give(self._commands, self._events)
            try:
                self._commands.bind(self.commands_url)
                self._events.bind(self.events_url)
            except zmq.ZMQError as error:
                raise StartFailed(
                    f"expected to listen at {self.commands_url}, found {error}. "
                    "Type: %distributed start"
                ) from error
        self.start()

    def start(self) -> None:
        """Starts the thread that receives, unless it runs."""
        if self._thread.ident is None:
            self._thread.start()

    def post(self, call: Callable[[], object]) -> bool:
        """Has the thread that receives call a function; returns false if it has ended. All calls
        are made in their order.
        """
        if threading.get_ident() == self._thread.ident:
            # After those that wait: another thread's may be news of what this call follows from.
            self._posted.put(call)
            self._make_calls()
            return True
        with deferred(), self.lock:
            if not self._closed:
                self._posted.put(call)
                self._wake_writer.send(b"")
            return not self._closed

    def settle(self) -> None:
        """Returns once the calls that were posted before are made, in another thread than that."""
        made: queue.SimpleQueue[None] = queue.SimpleQueue()
        if self.post(lambda: made.put(None)):
            with suppress(queue.Empty):
                made.get(timeout=_SETTLE_SECONDS)

    def _make_posted_calls(self) -> bool:
        """Returns whether the thread is to end: no further call comes then."""
        self._wake_reader.recv()
        is_over = self._closed  # first: else a call could come between
        self._make_calls()
        return is_over

    def _make_calls(self) -> None:
        with suppress(queue.Empty):
            while True:
                call = self._posted.get_nowait()
                try:
                    call()
                except Exception as error:
                    self._report(error)

    def send(self, ranks: Iterable[int], record: Record, *payloads: bytes) -> bool:
        """Sends a record to all of these ranks; returns whether all were connected."""
        frames = encode(record, *payloads)
        # Half a message would swallow the next one.
        with deferred(), self.lock:
            self._show(record, frames)
            if self.host_of:
                self._send_by_relays(ranks, frames)
                return True
            sent = [self._send([f"rank-{rank}".encode(), *frames]) for rank in ranks]
        return all(sent)

    def _show(self, record: Record, frames: Frames) -> None:
        for one in self.observers:
            if isinstance(record, one.records):
                one.take(record, frames)

    def command(self, host: str, word: str, line: str) -> None:
        """Sends a command to a host's relay; drops it if the relay has ended."""
        with deferred(), self.lock:
            self._send_to_host(host, [word.encode(), line.encode()])

    def forget(self, host: str) -> None:
        """Accepts nothing from a host any longer. If it was only cut off, it is stopped once it can
        be reached again.
        """
        with deferred(), self.lock:
            if host in self._hosts:
                self._send_to_host(host, [b"stop", b""])
                self._last_signs[host] = None

    def take_over(self, hosts: Mapping[str, float]) -> None:
        """Takes over the hosts of another notebook, whose relays connect by themselves. Each has
        been silent for some seconds already, which count for its lease.
        """
        assert self.listening is not None
        with self.lock:
            for host, seconds in hosts.items():
                self._hosts[host] = HostMessages(self.listening.owner)
                self._last_signs[host] = self._now - seconds
                self._of_last_notebook.add(host)
        for host in hosts:
            with deferred(), self.lock:
                # Its announcement may have been read already. A second greeting has no effect.
                self._send([host.encode(), BEGIN, self.listening.owner])
            self.command(host, "reconnect", "")

    def is_in_doubt(self, ranks: Iterable[int]) -> bool:
        """Whether a host of these ranks is silent, or is lost, of which the news may still come."""
        late = self._now - limits.LATE_SECONDS
        signs = (self._last_signs.get(self.host_of.get(rank, ""), self._now) for rank in ranks)
        return any(last is None or last <= late for last in signs)

    def _send_by_relays(self, ranks: Iterable[int], frames: Frames) -> None:
        groups: dict[str, list[int]] = {}
        for rank in ranks:
            groups.setdefault(self.host_of[rank], []).append(rank)
        for host, there in groups.items():
            self._send_to_host(host, [b"ranks", json.dumps(there).encode(), *frames])

    def _send_to_host(self, host: str, frames: Frames) -> None:
        messages = self._hosts.get(host)
        if messages is not None and self._last_signs[host] is not None:
            self._send([host.encode(), *messages.add(frames)])

    def _send(self, frames: Frames) -> bool:
        if self._closed:
            return False
        try:
            self._commands.send_multipart(frames, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The rank died, which its host agent reports on another channel; or the network is
            # interrupted, and the host's relay will connect again.
            return False
        return True

    def _read(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        unread, is_over = 0, False
        while True:
            if self._now < self._next_look:
                # ZeroMQ reads from hosts in turns. So each host from which something has come has
                # given a sign before the next look, also if another one sends without end.
                unread = len(self._hosts)
            left_ms = math.ceil(1000 * max(0.0, self._next_look - self._now))
            # Where several hosts are expected, also without one: another thread may add them.
            limit_ms = left_ms if self.listening is not None else None
            ready = dict(poller.poll(0 if is_over else limit_ms))
            if limit_ms is not None:
                self._now = self._clock.now()
            try:
                if self._wake_reader in ready:
                    is_over = self._make_posted_calls() or is_over
                if self._events in ready:
                    self._take(self._receive())
                    unread -= 1
                elif is_over:
                    return
                else:
                    unread = 0
                if self._now >= self._next_look and unread <= 0:
                    self._find_silent_hosts()
            except Exception as error:
                # The thread must go on: without it no cell would ever end.
                self._report(error)

    def _receive(self) -> list[bytes]:
        received = self._events.recv_multipart(copy=False)
        self._last = received[0]
        # From other hosts large frames come in pieces.
        return [frame.bytes for frame in received] if self.listening is None else whole(received)

    def _take(self, frames: list[bytes]) -> None:
        if frames[0] == b"beat":
            self._confirm(frames[1].decode(), int(frames[2]), frames[3])
        elif frames[0] == BEGIN:
            self._messages_of(frames[1].decode()).begin(frames[2], int(frames[3]))
        elif frames[0] == b"host":
            host, number = frames[1].decode(), int(frames[2])
            messages = self._messages_of(host)
            if messages.accept(number) and self._last_signs[host] is not None:
                self._take_of_host(host, frames[3:])
        else:
            self._take_records(frames)

    def _take_of_host(self, host: str, frames: list[bytes]) -> None:
        if frames[0] == b"agent":
            self.deliver_host(host, frames[1])
        elif frames[0] == b"reconnected":
            self._of_last_notebook.discard(host)
        elif host not in self._of_last_notebook:
            pids: list[int] = []
            if frames[0] == SENDERS:
                pids, frames = read_senders(frames[1]), frames[2:]
            self._take_records(frames, host, pids)

    def _take_records(self, frames: list[bytes], host: str = "", pids: Sequence[int] = ()) -> None:
        for number, (message, record) in enumerate(decode_all(frames)):
            try:
                if isinstance(record, WireError) and host:
                    record.host = host
                    record.pid = pids[number] if number < len(pids) else 0
                if isinstance(record, WireError):
                    raise record
                self._show(record, message)
                payloads = message[1:]
                if (left := self._hooks.receive(record, payloads)) is not None:
                    self._inbox.put(FromRank(left, payloads))
            except Exception as error:
                self._report(error)  # the other ranks' are handled all the same

    def _report(self, error: Exception) -> None:
        if isinstance(error, WireError) and not error.host:
            error.pid = process_of(self._last)
        self._inbox.put(error)

    def _messages_of(self, host: str) -> HostMessages:
        messages = self._hosts.setdefault(host, HostMessages())
        if self._last_signs.get(host, 0) is not None:
            self._last_signs[host] = self._now
        return messages

    def _confirm(self, host: str, number: int, owner: bytes) -> None:
        """Confirms a host's messages; ``number`` is the last one of ``owner`` that it has
        received.
        """
        messages = self._messages_of(host)
        with self.lock:
            if self._closed:
                return
            messages.confirm(number, owner)
            if confirmation := messages.confirmation:
                self._send([host.encode(), *confirmation])
            # A relay announces itself on each new connection.
            while self._commands.poll(0):
                name, last, owner = self._commands.recv_multipart()
                if name.startswith(_NO_NAME):
                    continue  # of a connection whose name a newer one of the same host has taken
                again = self._messages_of(name.decode())
                for frames in again.on_connection(int(last), owner):
                    self._send([name, *frames])
        if self._last_signs[host] is not None:
            self.deliver_host(host, _BEAT)

    def _find_silent_hosts(self) -> None:
        self._next_look = self._now + _LOOK_SECONDS
        for host, last in list(self._last_signs.items()):  # another thread may forget one meanwhile
            if last is None:
                continue
            missed = self._now - last
            if missed >= limits.LATE_SECONDS:
                self.deliver_host(host, _LATE)
            if missed > self.lease_seconds:
                self.forget(host)
                self.deliver_host(host, _SILENT)

    def close(self) -> None:
        for observer in self.observers:
            observer.close()
        with self.lock:  # another thread may be in the middle of a message
            self._closed = True
        if self._thread.is_alive():
            self._wake_writer.send(b"")
            self._thread.join()
        for one in (self._commands, self._events, self._wake_reader, self._wake_writer):
            one.close(0)
        self._context.term()
        if self.listening is not None:
            self.listening.close()


@contextmanager
def closing_if_failed(wire: RankSockets) -> Iterator[None]:
    """Within, an exception closes the sockets, of which nothing else knows yet."""
    try:
        yield
    except BaseException:
        wire.close()
        raise


def _listening(address: str, lowest: int, highest: int) -> socket.socket:
    problem = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    ports = range(lowest, highest + 1)
    for port in random.sample(ports, min(_TRIED_PORTS, len(ports))):
        try:
            found = socket.create_server((address, port), family=family_of(address))
        except OSError as error:
            problem = error
        else:
            # ZeroMQ's thread must not wait for a connection that is gone again.
            found.setblocking(False)
            return found
    raise StartFailed(
        f"expected a free port between {lowest} and {highest} at {address}, found {problem}. "
        "Set ALLRANKS_PORTS to others, and ALLRANKS_ADDRESS to an address of this machine"
    )


def _url_of(descriptor: int) -> str:
    with socket.socket(fileno=os.dup(descriptor)) as found:
        host, port, *_ = found.getsockname()
    return f"{tcp_url(host)}:{port}"


def _expect_threads() -> None:
    """Raises StartFailed if this process cannot start three threads: two are ZeroMQ's, which would
    end the process, and one receives.
    """
    end, started = threading.Event(), []
    try:
        for _ in range(3):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise StartFailed(
            f"expected that more threads can be started, found that they cannot ({error}): this "
            "account has as many processes and threads as it may (ulimit -u). End some of them, "
            "for example by restarting other kernels, and run the cell again."
        ) from error
    finally:
        end.set()
        for thread in started:
            thread.join()
