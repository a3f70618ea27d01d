"""Takes the place of a notebook whose ranks on several hosts stay, until another one attaches.

The notebook starts it on its own machine, when the ranks are to stay for the first time. It
inherits the sockets on which the notebook listens for the hosts, so no other process can have their
ports, and a host that connects meanwhile waits. Keys and news pass through pipes and a socket in a
folder that only this user may enter; they are in no file.

While a notebook has the ranks, the caretaker only answers others
(`allranks.engine.host.attachment`). When the notebook ends, it connects to the hosts' relays, makes
them disconnect the ranks, and stores their events. A notebook that attaches gets the sockets, what
the last one knew (``state``), and these events. If none comes in time, the caretaker ends all.

Standard output carries one JSON event a line, standard input one command a line.
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
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import zmq

from allranks.engine import processes
from allranks.engine.host.attachment import Attachment
from allranks.records.config import BEAT_SECONDS, CaretakerConfig, HostAgentConfig
from allranks.records.numbered import (
    BEGIN,
    ENCRYPTED_PIECE_NBYTES,
    HANDSHAKE_MS,
    Frames,
    HostMessages,
    whole,
)
from allranks.records.wire import read_object

_TICK_MS = 500
_STOP_SECONDS = 10.0
_SILENT = {"event": "host_silent"}
#: Events that the next notebook need not know.
_NO_NEWS = ("running", "launcher", "host_beat")
#: A rank's new process, also one that replaces a process whose end comes again.
_ALIVE_AGAIN = ("admitted", "replaces")


#: A host that sends more events has lost its way.
_MOST_NEWS_NBYTES = 4 << 20
_MOST_CELLS = 1 << 31


def _number(found: object, limit: int) -> int:
    if not isinstance(found, int) or not 0 <= found < limit:
        raise ValueError(f"expected a number below {limit}")
    return found


class KeptHost:
    """A host while no notebook has its ranks; ``is_up`` until its relay ends, or is silent. Then it
    is stopped once it can be reached again.
    """

    def __init__(self, owner: bytes) -> None:
        self.messages = HostMessages(owner)
        self.silent_seconds = 0.0
        self.is_up = True

    def lose(self) -> None:
        self.is_up = False
        self.messages.add([b"stop", b""])


class Caretaker:
    """Serves the notebooks of one cluster until the ranks have ended."""

    def __init__(self, config: CaretakerConfig, heard: bytes = b"") -> None:
        self._config = config
        ranks = HostAgentConfig.from_fields(dict(config.ranks))
        self._attachment = Attachment(dataclasses.replace(ranks, session_dir=config.folder))
        self._size = ranks.size
        #: What the notebook knew, and the events since then, with their hosts.
        self._state: dict[str, Any] = {}
        self._news: list[tuple[str, dict[str, Any]]] = []
        self._news_nbytes = 0
        self._dead: set[int] = set()
        self._running: dict[str, int] = {}
        self._hosts: dict[str, KeptHost] = {}
        self._heard = heard
        self._is_over = False
        #: After this time all end because MPI's job has ended, if no host is found to be lost.
        self._over_seconds = math.inf
        self._looked = time.monotonic()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands: zmq.Socket[bytes] | None = None
        self._events: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_is_over", True))
        os.mkdir(self._config.folder, 0o700)
        try:
            self._attachment.listen()
            assert self._attachment.door is not None
            self._poller.register(self._attachment.door.fileno(), zmq.POLLIN)
            self._poller.register(0, zmq.POLLIN)
            self._tell("ready")
            while not self._is_over:
                for source, _ in self._poller.poll(_TICK_MS):
                    self._serve(source)
                if self._attachment.open:
                    self._find_silent_hosts()
                    if self._attachment.over:
                        self._is_over = True
                elif self._attachment.left:
                    self._take_over()
            if self._attachment.open:
                self._stop()
        finally:
            shutil.rmtree(self._config.folder, ignore_errors=True)

    def _serve(self, source: Any) -> None:
        if source == 0:
            self._hear()
        elif source is self._events:
            self._take_from_host(self._take, whole(self._events.recv_multipart(copy=False)))
        elif source is self._commands:
            self._take_from_host(self._greet, self._commands.recv_multipart())
        elif not isinstance(source, zmq.Socket):  # else it has just been closed
            self._visited()

    def _hear(self) -> None:
        """Runs commands of the notebook: ``stay``, ``state``, ``running`` and ``stop``."""
        try:
            said = os.read(0, 65536)
        except ConnectionError:
            said = b""
        *lines, self._heard = (self._heard + said).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "stop":
                self._is_over = True
            elif word == "stay":
                self._attachment.stay(**json.loads(rest))
            elif word == "state":
                self._state, self._news, self._news_nbytes = json.loads(rest), [], 0
                ends, new = self._state["dead"], dict(self._state["replaced"])
                # The notebook keeps the end of a process whose replacement has just begun.
                self._dead = {
                    end["rank"] for end in ends if new.get(end["rank"]) in (None, end["pid"])
                }
                if self._state["starts_again"]:
                    self._over_seconds = math.inf
            elif word == "running":
                self._note_running(**json.loads(rest))
        if not said and not self._is_over:
            self._take_over()

    def _note_running(self, host: str, cell: int) -> None:
        self._running[host] = cell
        self._attachment.running[0] = max(self._running.values())

    def _tell(self, event: str, *sockets: int, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}).encode() + b"\n"
        with suppress(OSError):  # the end of the notebook is noticed elsewhere
            if sockets:
                with socket.socket(fileno=os.dup(1)) as notebook:
                    socket.send_fds(notebook, [line[:1]], sockets)
                    notebook.sendall(line[1:])
            else:
                processes.write_all(1, line)

    def _take_over(self) -> None:
        """Takes the place of the notebook, which has ended or detached."""
        self._poller.unregister(0)
        self._heard = b""
        # A notebook that is to take its ranks with it leaves that to its caretaker as well.
        self._is_over = not self._attachment.stays
        self._attachment.begin()
        self._looked = time.monotonic()
        owner, ended = secrets.token_hex(8).encode(), set(self._state["ended"])
        self._hosts = {name: KeptHost(owner) for name in ended.union(self._used())}
        for name in ended:
            self._hosts[name].lose()
        # The other end of a connection that breaks connects again: no port can be lost.
        self._commands = self._open(zmq.ROUTER, self._config.listening[0])
        self._events = self._open(zmq.PULL, self._config.listening[1])
        self._send_to(self._hosts.keys() - ended, b"detach")

    def _used(self) -> list[str]:
        return [name for name, *_ in self._state["hosts"]]

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
        about = self._attachment.visited(lambda: self._tell("watched"))
        if about is None:
            return
        # The notebook listens from now on; connections that come first wait.
        self._close()
        silent = {name: host.silent_seconds for name, host in self._hosts.items()}
        self._hosts.clear()
        self._poller.register(0, zmq.POLLIN)
        more = {
            "state": self._state,
            "news": self._news,
            "silent": silent,
            "caretaker": dataclasses.asdict(self._config),
        }
        self._tell("attached", *self._config.listening, config=self._config.ranks, **about, **more)
        if about["watchers"]:
            self._tell("watched")

    def _take_from_host(self, take: Callable[[list[bytes]], None], frames: list[bytes]) -> None:
        # Every host has the key: what one sends must not end the ranks of the others.
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            take(frames)

    def _greet(self, frames: list[bytes]) -> None:
        # A relay announces itself on each new connection.
        name, last, owner = frames
        if host := self._hosts.get(name.decode()):
            for sent in host.messages.on_connection(int(last), owner):
                self._send(name, sent)

    def _send(self, name: bytes, frames: Frames) -> None:
        assert self._commands is not None
        self._commands.send_multipart([name, *frames])

    def _send_to(self, names: Iterable[str], word: bytes) -> None:
        for name in names:
            self._send(name.encode(), self._hosts[name].messages.add([word, b""]))

    def _take(self, frames: list[bytes]) -> None:
        kind, name, *rest = frames
        host = self._hosts.get(name.decode())
        if host is None:
            return
        host.silent_seconds = 0.0
        if kind == BEGIN:
            host.messages.begin(rest[0], int(rest[1]))
        elif kind == b"beat":
            host.messages.confirm(int(rest[0]), rest[1])
            if confirmation := host.messages.confirmation:
                self._send(name, confirmation)
        elif kind == b"host" and host.messages.accept(int(rest[0])) and rest[1] == b"agent":
            # Records of ranks were for the last notebook: the ranks keep them.
            self._take_event(name.decode(), rest[2])

    def _take_event(self, name: str, line: bytes) -> None:
        told = read_object(line)
        event = told["event"]
        if not self._hosts[name].is_up:
            return
        if self._state["starts_again"] and not event.startswith("host_"):
            return  # of ranks that the next notebook starts once more
        if event == "running":
            self._note_running(name, _number(told["cell"], _MOST_CELLS))
        if event in ("exit", *_ALIVE_AGAIN):
            _number(told["rank"], self._size)
        if event not in _NO_NEWS:
            self._news.append((name, told))
            self._news_nbytes += len(line)
            if self._news_nbytes > _MOST_NEWS_NBYTES:
                self._news.append((name, _SILENT))
                self._lose(name)
                return
        if event == "exit":
            self._dead.add(told["rank"])
            if len(self._dead) == self._size:
                self._is_over = True
        elif event in _ALIVE_AGAIN:
            self._dead.discard(told["rank"])
        elif event == "launcher_exit" and name == self._used()[0]:
            # It ends without one of its hosts; then ranks can be started on the others.
            patience = self._lease_seconds + BEAT_SECONDS if self._config.ranks["heals"] else 0.0
            self._over_seconds = patience
        elif event == "host_down":
            self._lose(name)

    def _lose(self, name: str) -> None:
        self._hosts[name].lose()
        self._note_running(name, 0)
        if not any(host.is_up for host in self._hosts.values()):
            self._is_over = True

    @property
    def _lease_seconds(self) -> float:
        return self._config.lease_seconds + BEAT_SECONDS

    def _find_silent_hosts(self) -> None:
        # A process that stood still has not read what came meanwhile: that time does not count.
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, BEAT_SECONDS), now
        for name, host in self._hosts.items():
            host.silent_seconds += passed
            if host.is_up and host.silent_seconds > self._lease_seconds:
                self._news.append((name, _SILENT))
                self._lose(name)
        self._over_seconds -= passed
        if self._over_seconds < 0 and all(self._hosts[name].is_up for name in self._used()):
            self._is_over = True

    def _stop(self) -> None:
        """Ends the ranks on all hosts that can be reached; the others end by themselves."""
        self._send_to([name for name, host in self._hosts.items() if host.is_up], b"stop")
        deadline = time.monotonic() + _STOP_SECONDS
        while any(host.is_up for host in self._hosts.values()) and time.monotonic() < deadline:
            for source, _ in self._poller.poll(_TICK_MS):
                if source in (self._events, self._commands):
                    self._serve(source)
        self._close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    found = processes.first_line(0)
    if found is not None:
        line, rest = found
        Caretaker(CaretakerConfig.from_json(line.decode()), rest).run()


if __name__ == "__main__":
    main()
