"""A rank's end of the wire: commands in, output and replies out, beside ipyparallel's channels.

Two sockets, both encrypted (CURVE) with the notebook's public key, which serves as the shared
secret: a DEALER that one thread reads commands from, and a PUSH that any thread writes to under a
lock. The thread also sends the transcript's news, a few times a second.

Where ranks are on several hosts the sockets lead to the host's relay, in a folder that only this
user may enter, and the relay's to the notebook are encrypted.

Where a rank is to stay when its notebook goes, it notices that the line breaks, keeps what it would
send, and listens at a socket in such a folder for the next notebook (see
``allranks.engine.attaching``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from os import _exit, getpid, write
from time import monotonic, sleep
from traceback import format_exc
from typing import NoReturn

import zmq
from zmq.utils.monitor import recv_monitor_message

from allranks.engine.telemetry import TelemetrySender
from allranks.engine.transcript import Transcript
from allranks.engine.unseen import Unseen
from allranks.records.config import COMMANDS_AT_HOME, EVENTS_AT_HOME
from allranks.records.wire import Answer, Hello, Output, Record, decode, encode

_TICK_SECONDS = 0.05
_IDLE_TICK_SECONDS = 0.25
_LINGER_MS = 1000
_RECONNECT_MS = 20
#: Nobody may come for hours.
_RECONNECT_LATER_MS = 500
#: The line to who has started the rank may break, and be mended: it is gone where nobody listens.
_GONE = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
#: The exit code of a rank that can tell the notebook nothing more.
GAVE_UP = 70

Receive = Callable[[Record, list[bytes]], None]


class Wire:
    """Carries records between this rank and the notebook until the process ends.

    Args:
        rank: this process's rank.
        commands_url: where the notebook's ROUTER listens.
        events_url: where the notebook's PULL listens.
        key: the notebook's CURVE public key; empty where a relay of this host listens.
        transcript: whose news are sent.
        telemetry: sent while a cell runs.
        receive: called in the wire's thread with each record and its payloads.
    """

    def __init__(
        self,
        rank: int,
        commands_url: str,
        events_url: str,
        key: str,
        transcript: Transcript,
        telemetry: TelemetrySender,
        receive: Receive,
    ) -> None:
        self.rank = rank
        #: A process that a cell forks has a copy of the sockets, which are the rank's.
        self._pid = getpid()
        self.cell = 0
        self.busy = False
        #: Sends what else is new; not under this wire's lock, as it takes one of its own before.
        self.before_output: Callable[[bool], object] = lambda final: None
        self._transcript = transcript
        self._telemetry = telemetry
        self._receive = receive
        self._lock = threading.RLock()
        #: What is kept for another notebook, where this rank stays when the first one goes.
        self.unseen: Unseen | None = None
        self._home = ""
        self._attached = True
        self._monitor: zmq.Socket[bytes] | None = None
        # Not the one that programs share: a cell may end that.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connect(commands_url, events_url, key)
        self._thread = threading.Thread(target=self._loop, name="allranks-wire", daemon=True)

    def _connect(self, commands_url: str, events_url: str, key: str, patience: int = 0) -> None:
        self._poller = zmq.Poller()
        self._commands = self._context.socket(zmq.DEALER)
        self._commands.setsockopt(zmq.IDENTITY, f"rank-{self.rank}".encode())
        self._events = self._context.socket(zmq.PUSH)
        public, secret = zmq.curve_keypair()
        for socket, url in ((self._commands, commands_url), (self._events, events_url)):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, patience)
            if key:
                socket.curve_serverkey = key.encode()
                socket.curve_publickey = public
                socket.curve_secretkey = secret
            socket.connect(url)
        self._poller.register(self._commands, zmq.POLLIN)

    def stay(self, home: str) -> None:
        """From now on another notebook may come when this one goes.

        To be called before the start, or in the wire's thread.

        Args:
            home: the folder in which it will listen; empty where nobody is to be waited for.
        """
        with self._lock:
            self._home = home
            if self.unseen is None:
                self.unseen = Unseen(self.rank, self._transcript.path)
                self._watch_line(_GONE)

    def _watch_line(self, events: int) -> None:
        self._monitor = self._commands.get_monitor_socket(events)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _leave_line(self) -> None:
        """The notebook is gone: what is sent is kept until the next one comes."""
        assert self._monitor is not None
        recv_monitor_message(self._monitor)
        if not self._home:
            return
        with self._lock:
            self._attached = False
            self._commands.disable_monitor()
            for socket in (self._monitor, self._commands, self._events):
                socket.close(0)
            self._connect(
                COMMANDS_AT_HOME.format(self._home),
                EVENTS_AT_HOME.format(self._home),
                "",
                _RECONNECT_LATER_MS,
            )
            # That nobody is there yet is no news; who comes next is another one.
            self._watch_line(zmq.EVENT_DISCONNECTED)

    def resume(self, answer: Answer) -> None:
        """Sends another notebook what the last one may not have shown, and what follows."""
        with self._lock:
            for frames in self.unseen.messages(self.cell) if self.unseen is not None else ():
                self._events.send_multipart(frames)
            self._attached = True
            self.send(answer)

    def start(self) -> None:
        """Starts the thread that reads commands and sends the transcript's news."""
        self._thread.start()

    def send(self, record: Record, *payloads: bytes) -> None:
        """Sends a record from any thread, after everything that was sent before it."""
        if getpid() != self._pid:
            return
        # Copied before the first is sent: half a message would swallow the next one, and lending
        # memory takes a thread and descriptors, of which a cell may have left none.
        parts = encode(record, *payloads)
        frames = [zmq.Frame(part, copy=True) for part in parts]
        with self._lock:
            if self.unseen is not None:
                self.unseen.take(record, parts)
            if not self._attached and not isinstance(record, Answer | Hello):
                return  # what is not kept either is of no use later
            self._events.send_multipart(frames)

    def send_output(self, final: bool = False) -> None:
        """Sends what the transcript has that the notebook does not, and the news of the cell."""
        self.end_where_closed()
        self.before_output(final)
        with self._lock:
            entries, lines, nbytes, offset = self._transcript.collect(final)
            self.send_entries(entries, lines, nbytes, offset)
            if self.busy:
                for record, payloads in self._telemetry.news(final):
                    self.send(record, *payloads)

    def end_where_closed(self) -> None:
        """Ends the rank where a cell has closed its log: what it prints would be lost."""
        lost = self._transcript.lost() if getpid() == self._pid else []
        if lost:
            self._transcript.streams.reopen_err()
            give_up(
                self.rank,
                f"cannot go on without its own descriptors ({', '.join(map(str, lost))}), "
                "which a cell has closed",
                "Close what the cell itself has opened, instead of all that is open.\n",
            )

    def begin_cell(self, cell: int, limit_nbytes: int) -> None:
        """Sends what is left of the time before this cell, then starts its screen budget."""
        with self._lock:
            late = self._transcript.begin_cell(limit_nbytes)
            self.send_entries(late, 0, 0, 0)
            if self.unseen is not None:
                self.unseen.clear()
            self._last_counts = (0, 0)
            self._telemetry.begin(cell)
            self.cell = cell
            self.busy = True

    _last_counts = (0, 0)
    _said = ""

    def send_entries(self, entries: list[list[object]], lines: int, nbytes: int, at: int) -> None:
        """Sends one batch unless there is nothing new in it."""
        if entries or (lines, nbytes) != self._last_counts:
            self._last_counts = (lines, nbytes)
            spans = self._transcript.err_spans
            self.send(Output(self.rank, self.cell, tuple(entries), lines, nbytes, at, spans))

    def _loop(self) -> None:
        next_tick = monotonic()
        while True:
            try:
                tick = _TICK_SECONDS if self.busy else _IDLE_TICK_SECONDS
                wait = min(tick, max(0.0, next_tick - monotonic()))
                ready = dict(self._poller.poll(int(wait * 1000)))
                if self._commands in ready:
                    self._receive(*decode(self._commands.recv_multipart()))
                    # A cell may begin: its first news come as soon as those that follow.
                    next_tick = min(next_tick, monotonic() + _TICK_SECONDS)
                if self._monitor in ready:
                    self._leave_line()
                if monotonic() >= next_tick:
                    next_tick = monotonic() + tick
                    self.send_output()
            except zmq.ContextTerminated:  # the process ends
                return
            except zmq.ZMQError:
                give_up(self.rank, "lost the connection to the notebook")
            except BaseException:
                # As where a cell has replaced what all of Python uses, until it ends.
                self._complain()
                sleep(_IDLE_TICK_SECONDS)

    def _complain(self) -> None:
        try:
            said = format_exc()
            if said != self._said:
                self._said = said
                write(2, said.encode())
        except BaseException:
            pass  # without this thread the rank is deaf


def give_up(rank: int, why: str, more: str = "") -> NoReturn:
    """Ends the rank, whose cell would wait for it for ever; its log says why.

    Args:
        rank: this process's.
        why: what it cannot do.
        more: what to do about it; without, what has been raised is shown.
    """
    try:
        write(2, f"allranks: rank {rank} {why}, so it ends.\n{more or format_exc()}".encode())
    finally:
        _exit(GAVE_UP)
