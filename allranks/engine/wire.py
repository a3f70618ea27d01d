"""A rank's end of the wire: commands in, output and replies out, beside the kernel's channels.

Two sockets in a folder that only this user may enter: a DEALER from which one thread reads
commands, and a PUSH to which any thread writes under a lock. The thread also sends new output, a
few times a second.

With ranks on several hosts, the sockets lead to the host's relay, and those from the relay to the
notebook are encrypted.

A rank that stays when its notebook ends notices the end of the connection, keeps further output,
and connects to other sockets in this folder, at which the next notebook listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os import _exit, getpid, write
from time import monotonic, sleep
from traceback import format_exc
from typing import NoReturn, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from allranks.engine.telemetry import TelemetrySender
from allranks.engine.transcript import Entry, Transcript
from allranks.records.config import COMMANDS_AT_HOME, EVENTS_AT_HOME
from allranks.records.wire import (
    Answer,
    Hello,
    Output,
    Record,
    Reply,
    decode,
    encode,
    join_messages,
)

_TICK_SECONDS = 0.05
_IDLE_TICK_SECONDS = 0.25
_LINGER_MS = 1000
#: The output of a client's request that is sent to the client.
_CLIENT_NBYTES = 1 << 20
_RECONNECT_MS = 20
#: The next notebook may come after hours.
_RECONNECT_LATER_MS = 500
#: ZeroMQ reconnects. The first notebook counts as gone only once the connection is refused.
_GONE = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
#: The exit code of a rank that has lost its connection to the notebook.
GAVE_UP = 70

_copied = partial(zmq.Frame, copy=True)

Receive = Callable[[Record, list[bytes]], None]


class KeptOutput(Protocol):
    """Records of the last cell, for the next notebook."""

    def take(self, record: Record, frames: Sequence[bytes]) -> None:
        """Keeps a record, if it matters to that notebook."""

    def messages(self, cell: int) -> Iterable[Sequence[bytes]]:
        """Returns the messages to send again, in order; ``cell`` is the cell's number."""

    def clear(self) -> None:
        """Forgets them: another cell begins."""


class RankWire:
    """Carries records between this rank and the notebook until the process ends.

    ``receive`` is called in the wire's thread with each record and its payloads.
    """

    def __init__(
        self,
        rank: int,
        commands_url: str,
        events_url: str,
        transcript: Transcript,
        telemetry: TelemetrySender,
        receive: Receive,
    ) -> None:
        self.rank = rank
        #: A process that a cell forks has a copy of the sockets, which are the rank's.
        self._pid = getpid()
        self.cell = 0
        self.busy = False
        #: Called before output is sent, except a cell's last, without this wire's lock: it takes
        #: another lock first.
        self.before_output: Callable[[], object] = lambda: None
        #: Called as often as output is sent, while no notebook is there.
        self.without_notebook: Callable[[], object] = lambda: None
        self._transcript = transcript
        self._telemetry = telemetry
        self._receive = receive
        # Reentrant, because `send_output` calls `send`.
        self._lock = threading.RLock()
        self._kept: KeptOutput | None = None
        self._last_counts = (0, 0)
        self._last_offset = 0
        #: Takes the output while a request of a client runs.
        self._publish: Callable[[list[Entry]], object] | None = None
        self._complaint = ""
        self._home = ""
        self._has_notebook = True
        self._monitor: zmq.Socket[bytes] | None = None
        # Not the one that programs share, which a cell may end.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connect(commands_url, events_url)
        self._thread = threading.Thread(target=self._loop, name="allranks-wire", daemon=True)

    def _connect(self, commands_url: str, events_url: str, patience: int = 0) -> None:
        self._poller = zmq.Poller()
        self._commands = self._context.socket(zmq.DEALER)
        self._commands.setsockopt(zmq.IDENTITY, f"rank-{self.rank}".encode())
        self._events = self._context.socket(zmq.PUSH)
        for socket, url in ((self._commands, commands_url), (self._events, events_url)):
            # No limits: at a limit, ``send`` would block.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, patience)
            socket.connect(url)
        self._poller.register(self._commands, zmq.POLLIN)

    def stay(self, home: str, kept: KeptOutput) -> None:
        """Prepares for another notebook, which will listen in ``home``; empty to end that again.

        To be called before the start, or in the wire's thread.
        """
        with self._lock:
            self._home = home
            if self._kept is None:
                self._kept = kept
                self._watch_line(_GONE)

    def _watch_line(self, events: int) -> None:
        self._monitor = self._commands.get_monitor_socket(events)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _leave_line(self) -> None:
        assert self._monitor is not None
        recv_monitor_message(self._monitor)
        if not self._home:
            return
        with self._lock:
            # Output is kept until the next notebook comes.
            self._has_notebook = False
            self._commands.disable_monitor()
            for socket in (self._monitor, self._commands, self._events):
                socket.close(0)
            self._connect(
                COMMANDS_AT_HOME.format(self._home),
                EVENTS_AT_HOME.format(self._home),
                _RECONNECT_LATER_MS,
            )
            # Not refused connections: the next notebook is not there yet.
            self._watch_line(zmq.EVENT_DISCONNECTED)

    def resume(self) -> None:
        """Sends the kept output to another notebook, and from now on all records."""
        with self._lock:
            for frames in self._kept.messages(self.cell) if self._kept is not None else ():
                self._events.send_multipart(frames)
            self._has_notebook = True

    def start(self) -> None:
        self._thread.start()

    def send(self, record: Record, *payloads: bytes) -> None:
        """Sends a record from any thread, after all that were sent before it."""
        self._send_all([(record, list(payloads))])

    def _send_all(self, messages: Sequence[tuple[Record, list[bytes]]]) -> None:
        if getpid() != self._pid:
            return
        parts = [encode(record, *payloads) for record, payloads in messages]
        with self._lock:
            if self._kept is not None:
                for (record, _), frames in zip(messages, parts, strict=True):
                    self._kept.take(record, frames)
            if not self._has_notebook:
                pairs = zip(messages, parts, strict=True)
                parts = [part for (one, _), part in pairs if isinstance(one, Answer | Hello)]
            if parts:
                # Copied before the first part is sent, because half a message would take the next
                # one with it. Sending without a copy needs a thread and descriptors, which a cell
                # may have used up.
                self._events.send_multipart([*map(_copied, join_messages(parts))])

    def send_output(self, replies: Sequence[tuple[Record, list[bytes]]] = ()) -> None:
        """Sends what is new; at the end of a cell the rest of it, together with the replies."""
        final = bool(replies)
        if not final:  # else the end of the cell has done this
            lost = self._transcript.lost() if getpid() == self._pid else []
            if lost:
                self.end_without_log(lost)
            self.before_output()
        with self._lock:
            if self._publish is not None:
                self._publish(self._transcript.collect()[0])
                return
            messages = list[tuple[Record, list[bytes]]]()
            entries, lines, nbytes, offset = self._transcript.collect(final)
            # What only the log shall have changes nothing but the offset.
            ends_later = final and offset != self._last_offset
            if entries or ends_later or (lines, nbytes) != self._last_counts:
                self._last_counts, self._last_offset = (lines, nbytes), offset
                spans = self._transcript.err_spans
                output = Output(self.rank, self.cell, tuple(entries), lines, nbytes, offset, spans)
                messages.append((output, []))
            if self.busy:
                messages += self._telemetry.news(final)
            if final:
                self.busy = False
            if messages or replies:
                # As one message, with which the notebook also ends the cell.
                self._send_all([*messages, *replies])

    def end_without_log(self, lost: list[int]) -> NoReturn:
        """Ends the rank: without these descriptors of its log, further output would be lost."""
        self._transcript.streams.reopen_err()
        give_up(
            self.rank,
            f"needs its own file descriptors ({', '.join(map(str, lost))}), "
            "which a cell has closed",
            "Close what the cell itself has opened, instead of all that is open.\n",
        )

    @contextmanager
    def output_for_client(self, publish: Callable[[list[Entry]], object]) -> Iterator[bool]:
        """Gives the output of a client's request to ``publish``, and yields whether it does.

        The output of a request that runs while a cell awaits belongs to the cell.
        """
        with self._lock:
            alone = not self.busy
            if alone:
                self._send_late(_CLIENT_NBYTES)
                self._publish = publish
        try:
            yield alone
            self._transcript.streams.flush_replaced()
        finally:
            with self._lock:
                if self._publish is publish:
                    self._publish = None
                    publish(self._transcript.collect(final=True)[0])

    def _send_late(self, limit_nbytes: int) -> None:
        late = self._transcript.begin_cell(limit_nbytes)
        if late:
            spans = self._transcript.err_spans
            self.send(Output(self.rank, self.cell, tuple(late), 0, 0, 0, spans))

    def begin_cell(self, cell: int, limit_nbytes: int) -> None:
        with self._lock:
            # A file that took the number of a closed descriptor may have been closed since the
            # last cell, by a thread or a finalizer: that closes the restored one.
            self._transcript.streams.mend()
            # Output from between the cells is sent first.
            self._send_late(limit_nbytes)
            self._publish = None
            if self._kept is not None:
                self._kept.clear()
            self._last_counts = (0, 0)
            self._telemetry.begin(cell)
            self.cell = cell
            self.busy = True

    def leave_out(self, reply: Reply) -> None:
        """Sends the reply to a cell that does not begin here: it was the last one all the same."""
        with self._lock:
            if self._kept is not None:
                self._kept.clear()
            self.cell = reply.cell
            self.send(reply)

    def _loop(self) -> None:
        next_tick = monotonic()
        while True:
            try:
                tick = _TICK_SECONDS if self.busy else _IDLE_TICK_SECONDS
                wait = min(tick, max(0.0, next_tick - monotonic()))
                ready = dict(self._poller.poll(int(wait * 1000)))
                if self._commands in ready:
                    self._receive(*decode(self._commands.recv_multipart()))
                    # A cell may begin: its first output is sent as soon as later output.
                    next_tick = min(next_tick, monotonic() + _TICK_SECONDS)
                if self._monitor in ready:
                    self._leave_line()
                if monotonic() >= next_tick:
                    next_tick = monotonic() + tick
                    if not self._has_notebook:
                        self.without_notebook()
                    self.send_output()
            except zmq.ContextTerminated:  # the process ends
                return
            except zmq.ZMQError:
                give_up(self.rank, "lost the connection to the notebook")
            except BaseException:
                # For example, a cell has replaced Python's builtins until it ends.
                self._complain()
                sleep(_IDLE_TICK_SECONDS)

    def _complain(self) -> None:
        try:
            text = format_exc()
            if text != self._complaint:
                self._complaint = text
                write(2, text.encode())
        except BaseException:
            pass  # this thread must go on: no other one receives records


def give_up(rank: int, why: str, more: str = "") -> NoReturn:
    """Ends the rank with a message in its log: its cell would wait for ever."""
    try:
        write(2, f"allranks: rank {rank} {why}, so it ends.\n".encode())
        write(2, (more or format_exc()).encode())  # a cell may have broken the latter
    finally:
        _exit(GAVE_UP)
