"""A rank's end of the wire: commands in, output and replies out, beside ipyparallel's channels.

Two sockets, both encrypted (CURVE) with the notebook's public key, which serves as the shared
secret: a DEALER that one thread reads commands from, and a PUSH that any thread writes to under a
lock. The thread also sends the transcript's news, a few times a second.

Where ranks are on several hosts the sockets lead to the host's relay, in a folder that only this
user may enter, and the relay's to the notebook are encrypted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from os import _exit, write
from time import monotonic, sleep
from traceback import format_exc
from typing import NoReturn

import zmq

from allranks.engine.forks import in_rank
from allranks.engine.telemetry import Teller
from allranks.engine.transcript import Transcript
from allranks.records.wire import Output, Record, decode, encode

_TICK_SECONDS = 0.05
_IDLE_TICK_SECONDS = 0.25
_LINGER_MS = 1000
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
        teller: what else is told while a cell runs.
        receive: called in the wire's thread with each record and its payloads.
    """

    def __init__(
        self,
        rank: int,
        commands_url: str,
        events_url: str,
        key: str,
        transcript: Transcript,
        teller: Teller,
        receive: Receive,
    ) -> None:
        self.rank = rank
        self.cell = 0
        self.busy = False
        #: Sends what else is new; not under this wire's lock, as it takes one of its own before.
        self.before_output: Callable[[bool], object] = lambda final: None
        self._transcript = transcript
        self._teller = teller
        self._receive = receive
        self._lock = threading.RLock()
        # Not the one that programs share: a cell may end that.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands = context.socket(zmq.DEALER)
        self._commands.setsockopt(zmq.IDENTITY, f"rank-{rank}".encode())
        self._events = context.socket(zmq.PUSH)
        public, secret = zmq.curve_keypair()
        for socket, url in ((self._commands, commands_url), (self._events, events_url)):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            socket.setsockopt(zmq.RECONNECT_IVL, 20)
            if key:
                socket.curve_serverkey = key.encode()
                socket.curve_publickey = public
                socket.curve_secretkey = secret
            socket.connect(url)
        self._thread = threading.Thread(target=self._loop, name="allranks-wire", daemon=True)

    def start(self) -> None:
        """Starts the thread that reads commands and sends the transcript's news."""
        self._thread.start()

    def send(self, record: Record, *payloads: bytes) -> None:
        """Sends a record from any thread, after everything that was sent before it."""
        if not in_rank():
            return  # the connection is the rank's
        # Copied before the first is sent: half a message would swallow the next one, and lending
        # memory takes a thread and descriptors, of which a cell may have left none.
        frames = [zmq.Frame(part, copy=True) for part in encode(record, *payloads)]
        with self._lock:
            self._events.send_multipart(frames)

    def send_output(self, final: bool = False) -> None:
        """Sends what the transcript has that the notebook does not, and the news of the cell."""
        self.before_output(final)
        with self._lock:
            entries, lines, nbytes, offset = self._transcript.collect(final)
            self.send_entries(entries, lines, nbytes, offset)
            if self.busy:
                for record, payloads in self._teller.news(final):
                    self.send(record, *payloads)

    def begin_cell(self, cell: int, limit_nbytes: int) -> None:
        """Sends what is left of the time before this cell, then starts its screen budget."""
        with self._lock:
            late = self._transcript.begin_cell(limit_nbytes)
            self.send_entries(late, 0, 0, 0)
            self._last_counts = (0, 0)
            self._teller.begin(cell)
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
        poller = zmq.Poller()
        poller.register(self._commands, zmq.POLLIN)
        next_tick = monotonic()
        while True:
            try:
                tick = _TICK_SECONDS if self.busy else _IDLE_TICK_SECONDS
                wait = min(tick, max(0.0, next_tick - monotonic()))
                if poller.poll(int(wait * 1000)):
                    self._receive(*decode(self._commands.recv_multipart()))
                if monotonic() >= next_tick:
                    next_tick = monotonic() + tick
                    self.send_output()
            except zmq.ContextTerminated:  # the process ends
                return
            except zmq.ZMQError:
                give_up(self.rank, "can hear the notebook no longer")
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


def give_up(rank: int, why: str) -> NoReturn:
    """Ends the rank, whose cell would wait for it for ever; its log says why."""
    try:
        write(2, f"allranks: rank {rank} {why}, so it ends.\n{format_exc()}".encode())
    finally:
        _exit(GAVE_UP)
