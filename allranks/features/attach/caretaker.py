"""Takes the place of a notebook whose ranks on several hosts stay, until another one attaches.

The notebook starts it on its own machine, when the ranks are to stay for the first time. It
inherits the sockets on which the notebook listens for the hosts, so no other process can have their
ports, and a host that connects meanwhile waits. Keys and news pass through pipes and a socket in a
folder that only this user may enter; they are in no file.

While a notebook has the ranks, the caretaker only answers others
(`allranks.features.attach.attachment`). When the notebook ends, it connects to the hosts' relays,
makes them disconnect the ranks, and stores their events. A notebook that attaches gets the sockets,
what the last one knew (``state``), and these events. If none comes in time, the caretaker ends all.

Standard output carries one event a line, standard input one command a line
(`allranks.records.agent`). What it decides is in `allranks.features.attach.caretaker_state`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import shutil
import signal
import socket
from contextlib import suppress
from typing import Any

import zmq

from allranks.countdown import AwakeClock
from allranks.engine import processes
from allranks.engine.host.events import NotebookSaid, Terminated, TimeCame
from allranks.features.attach.attachment import Attachment
from allranks.features.attach.caretaker_state import (
    CaretakerState,
    CloseDoor,
    Command,
    Event,
    HandOver,
    HostGreeted,
    HostSent,
    Listen,
    NobodyCame,
    NotebookAttached,
    OwnerLeft,
    SetStay,
    ShowRunning,
    ToHost,
)
from allranks.features.attach.records import CaretakerConfig, Ready, Watched
from allranks.records.agent import read_command, to_line
from allranks.records.config import HostAgentConfig
from allranks.records.numbered import ENCRYPTED_PIECE_NBYTES, HANDSHAKE_MS, whole

_TICK_SECONDS = 0.5


class Caretaker:
    """Serves the notebooks of one cluster until the ranks have ended."""

    def __init__(self, config: CaretakerConfig, heard: bytes = b"") -> None:
        self._config = config
        ranks = HostAgentConfig.from_fields(dict(config.ranks))
        ranks = dataclasses.replace(ranks, session_dir=config.folder)
        #: The cell that the ranks run, or 0.
        self._running = [0]
        self._attachment = Attachment(ranks, self._running)
        self._state = CaretakerState(config)
        self._clock = AwakeClock()
        self._heard = heard
        self._terminated = False
        #: What the notebook that has just attached was answered.
        self._about: dict[str, Any] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands: zmq.Socket[bytes] | None = None
        self._events: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_terminated", True))
        os.mkdir(self._config.folder, 0o700)
        try:
            self._poller.register(self._attachment.listen().fileno(), zmq.POLLIN)
            self._poller.register(0, zmq.POLLIN)
            self._write(to_line(Ready()))
            while not self._state.has_ended:
                self._wait()
        finally:
            shutil.rmtree(self._config.folder, ignore_errors=True)

    def _wait(self) -> None:
        left = max(0.0, min(_TICK_SECONDS, self._state.wake_at - self._clock.now()))
        for source, _ in self._poller.poll(math.ceil(left * 1000)):
            self._serve(source)
        if self._terminated:
            self._feed(Terminated())
        elif self._attachment.open and self._attachment.over:
            self._feed(NobodyCame())
        elif self._attachment.left:
            self._leave()
        if self._clock.now() >= self._state.wake_at:
            self._feed(TimeCame())

    def _serve(self, source: Any) -> None:
        if source == 0:
            self._hear()
        elif source is self._events:
            self._feed(HostSent(whole(self._events.recv_multipart(copy=False))))
        elif source is self._commands:
            self._feed(HostGreeted(self._commands.recv_multipart()))
        elif not isinstance(source, zmq.Socket):  # else it has just been closed
            self._visited()

    def _feed(self, event: Event) -> None:
        for command in self._state.apply(event, self._clock.now()):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case SetStay(stay):
                self._attachment.stay(stay.seconds, stay.memo)
            case ShowRunning(cell):
                self._running[0] = cell
            case Listen():
                self._poller.unregister(0)
                self._heard = b""
                self._attachment.begin()
                # The other end of a connection that breaks connects again: no port can be lost.
                self._commands = self._open(zmq.ROUTER, self._config.listening[0])
                self._events = self._open(zmq.PULL, self._config.listening[1])
            case ToHost(name, frames):
                assert self._commands is not None
                self._commands.send_multipart([name, *frames])
            case HandOver():
                self._hand_over(command)
            case CloseDoor():
                self._poller.unregister(self._attachment.door.fileno())
                self._attachment.door.close()
                shutil.rmtree(self._config.folder, ignore_errors=True)
            case _:
                raise ValueError(f"expected a command of the state, found {command!r:.200}")

    def _hear(self) -> None:
        try:
            said = os.read(0, 65536)
        except ConnectionError:
            said = b""
        *lines, self._heard = (self._heard + said).split(b"\n")
        for line in lines:
            self._feed(NotebookSaid(read_command(line)))
        if not said:
            self._leave()

    def _leave(self) -> None:
        self._feed(OwnerLeft(self._attachment.stays, secrets.token_hex(8).encode()))

    def _write(self, line: bytes, *sockets: int) -> None:
        with suppress(OSError):  # the end of the notebook is noticed elsewhere
            if sockets:
                with socket.socket(fileno=os.dup(1)) as notebook:
                    socket.send_fds(notebook, [line[:1]], sockets)
                    notebook.sendall(line[1:] + b"\n")
            else:
                processes.write_all(1, line + b"\n")

    def _open(self, kind: int, listening: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, 0)
        made.setsockopt(zmq.RCVHWM, 0)
        # Before a connection is encrypted, it may be anyone's.
        made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        made.setsockopt(zmq.MAXMSGSIZE, ENCRYPTED_PIECE_NBYTES)
        if kind == zmq.ROUTER:
            made.setsockopt(zmq.ROUTER_HANDOVER, 1)
        made.curve_server = True
        made.curve_publickey = self._config.key.encode()
        made.curve_secretkey = self._config.secret_key.encode()
        made.setsockopt(zmq.USE_FD, os.dup(listening))
        made.bind("tcp://127.0.0.1:*")  # not used: the socket listens already
        self._poller.register(made, zmq.POLLIN)
        return made

    def _close(self) -> None:
        for made in (self._commands, self._events):
            if made is not None:
                self._poller.unregister(made)
                made.close(0)
        self._commands = self._events = None

    def _visited(self) -> None:
        about = self._attachment.visited(lambda: self._write(to_line(Watched())))
        if about is not None:
            self._about = about
            self._feed(NotebookAttached())

    def _hand_over(self, command: HandOver) -> None:
        # The notebook listens from now on; connections that come first wait.
        self._close()
        self._poller.register(0, zmq.POLLIN)
        told = {
            "event": "attached",
            "config": self._config.ranks,
            **self._about,
            **dataclasses.asdict(command),
            "caretaker": dataclasses.asdict(self._config),
        }
        self._write(json.dumps(told).encode(), *self._config.listening)
        if self._about["watchers"]:
            self._write(to_line(Watched()))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    found = processes.first_line(0)
    if found is not None:
        line, rest = found
        Caretaker(CaretakerConfig.from_json(line.decode()), rest).run()


if __name__ == "__main__":
    main()
