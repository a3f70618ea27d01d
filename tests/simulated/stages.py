"""Where a script runs: processes with sockets, on real ZeroMQ or on its model.

A script is a function of a stage. It starts processes, which have sockets, and returns what it
observed. It waits for messages and events only.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

from tests.ports import free_port
from tests.simulated import kernel, zeromq
from tests.simulated.zeromq_sockets import EVENTS, Sockets

#: So long a script waits for what must come.
_LIMIT_MS = 60_000


class Refused(Exception):
    """ZeroMQ's error; ``args`` has the name of its number."""


class Socket:
    """A socket of a process of a script."""

    def __init__(self, process: Process, number: int) -> None:
        self.process, self.number = process, number

    def _call(self, name: str, *arguments: Any) -> Any:
        return self.process.call(name, self.number, *arguments)

    def bind(self, url: str) -> Socket:
        self._call("bind", url)
        return self

    def connect(self, url: str) -> Socket:
        self._call("connect", url)
        return self

    def send(self, *frames: bytes, flags: str = "") -> None:
        self._call("send", list(frames), flags)

    def refusal(self, *frames: bytes, flags: str = "") -> str:
        """Sends; returns the name of the error, or ``""``."""
        try:
            self.send(*frames, flags=flags)
        except Refused as error:
            return str(error)
        return ""

    def sends_until(self, wanted: str, *frames: bytes) -> str:
        """Sends again and again until the error is the wanted one."""
        while (found := self.refusal(*frames)) != wanted:
            self.process.stage.pause()
        return found

    def send_all(self, *messages: bytes, flags: str = "") -> None:
        self._call("send_all", [[each] for each in messages], flags)

    def receive(self) -> list[bytes]:
        return self.messages(1)[0]

    def messages(self, count: int) -> list[list[bytes]]:
        found: list[list[bytes]] = self._call("receive", _LIMIT_MS, count)
        if len(found) < count:
            raise AssertionError(f"expected {count} messages, found {found}")
        return found

    def messages_until(self, *last: bytes) -> list[list[bytes]]:
        """Returns the messages up to this one, without it."""
        found: list[list[bytes]] = []
        while (message := self.receive())[-len(last) :] != list(last):
            found.append(message)
        return found

    def event(self) -> str:
        found: str | None = self._call("event", _LIMIT_MS)
        if found is None:
            raise AssertionError("expected an event, found none")
        return found

    def events_until(self, last: str) -> list[str]:
        """Returns the events up to this one. Attempts to connect that fail alike count once."""
        found = [self.event()]
        while found[-1] != last:
            event = self.event()
            if event != found[-1]:
                found.append(event)
        return found

    def has_event(self) -> bool:
        return self._call("event", 0) is not None

    def close(self, linger: int = 0) -> None:
        self._call("close", linger)


class Process(Protocol):
    stage: Stage

    def call(self, name: str, *arguments: Any) -> Any: ...

    def socket(self, kind: str, events: tuple[str, ...] = (), **options: Any) -> Socket: ...

    def kill(self) -> None:
        """Ends it as the system ends a process: nothing of it is left."""

    def stop(self) -> None:
        """Stops it, with ZeroMQ's threads."""

    def go_on(self) -> None:
        """Lets it go on."""


class Line(Protocol):
    """A way to a server that can be interrupted."""

    url: str

    def hold(self) -> None:
        """From now on, nothing arrives; what is sent is on the way."""

    def await_sent(self) -> None:
        """Waits until something is on the way."""

    def release(self) -> None:
        """What is on the way arrives."""

    def cut(self) -> None:
        """Resets the connections: what is on the way is lost. New ones can be made."""


class Stage(Protocol):
    def process(self, *listening: str) -> Process:
        """Starts a process that has descriptors with these names, from `listen`."""

    def url(self) -> str:
        """The URL of a server, over TCP."""

    def ipc(self) -> str: ...

    def listen(self, name: str) -> str:
        """Opens a socket that listens, for processes that begin later; returns its URL."""

    def leave(self, name: str) -> None:
        """Closes it here; processes may have it."""

    def line(self, url: str) -> Line: ...

    def pause(self) -> None:
        """Lets others run."""


class _Process:
    """What the processes of both stages share."""

    stage: Any

    def socket(self, kind: str, events: tuple[str, ...] = (), **options: Any) -> Socket:
        return Socket(self, self.call("open", kind, options, events))  # type: ignore[attr-defined, arg-type]

    def events_socket(self, kind: str, **options: Any) -> Socket:
        return self.socket(kind, EVENTS, **options)

    def ready(self, *sockets: Socket, limit: int = _LIMIT_MS) -> list[Socket]:
        """Returns which of these sockets have messages, once one of them has."""
        found = self.call("ready", [one.number for one in sockets], limit)  # type: ignore[attr-defined]
        return [one for one in sockets if one.number in found]

    def end(self, linger: int = 0) -> None:
        """Closes all sockets, and waits until they are gone."""
        self.call("destroy", linger)  # type: ignore[attr-defined]


def _result(answer: tuple[str, Any]) -> Any:
    state, result = answer
    if state == "refused":
        raise Refused(result)
    return result


# Real ZeroMQ.
class RealProcess(_Process):
    def __init__(self, stage: RealStage, control: Connection, pid: int) -> None:
        self.stage, self._control, self._pid = stage, control, pid
        self._ended = False

    def call(self, name: str, *arguments: Any) -> Any:
        self._control.send((name, *arguments))
        return _result(self._control.recv())

    def kill(self) -> None:
        if self._ended:
            return
        self._ended = True
        descriptor = os.pidfd_open(self._pid)
        os.kill(self._pid, signal.SIGKILL)
        select.select([descriptor], [], [])  # until its sockets are closed
        os.close(descriptor)

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._control.close()


class _RealLine:
    """Forwards connections, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self._there = int(url.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._others: dict[socket.socket, socket.socket] = {}
        self._held: list[tuple[socket.socket, bytes]] = []
        self._holds = False
        self._something, self._done = threading.Event(), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._forward)
        self._thread.start()

    def _order(self, word: bytes) -> None:
        self._wake.sendall(word)
        self._done.acquire()

    def hold(self) -> None:
        self._order(b"h")

    def await_sent(self) -> None:
        assert self._something.wait(_LIMIT_MS / 1000)

    def release(self) -> None:
        self._order(b"r")

    def cut(self) -> None:
        self._order(b"c")

    def close(self) -> None:
        self._order(b"x")
        self._thread.join()
        for each in (self._listener, self._wake, self._woken, self._selector):
            each.close()

    def _forward(self) -> None:
        while True:
            for key, _ in self._selector.select():
                source: Any = key.fileobj
                if source is self._listener:
                    self._accept()
                elif source is not self._woken:
                    self._pass_on(source)
                elif self._obey(source.recv(1)):
                    return

    def _obey(self, word: bytes) -> bool:
        if word in (b"c", b"x"):
            for each in list(self._others):
                # With this, closing resets the connection.
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._close(each)
            self._others.clear()
        if word in (b"c", b"r"):
            held, self._held = self._held, []
            for there, data in held:
                if there in self._others:
                    self._send(there, data)
            self._something.clear()
        self._holds = word == b"h"
        self._done.release()
        return word == b"x"

    def _accept(self) -> None:
        near = self._listener.accept()[0]
        try:
            far = socket.create_connection(("127.0.0.1", self._there))
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._others[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        if source not in self._others:  # its other end has just been closed
            return
        other = self._others[source]
        try:
            data = source.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            for each in (source, other):
                self._others.pop(each, None)
                self._close(each)
        elif self._holds:
            self._held.append((other, data))
            self._something.set()
        else:
            self._send(other, data)

    def _send(self, there: socket.socket, data: bytes) -> None:
        with suppress(OSError):
            there.sendall(data)

    def _close(self, end: socket.socket) -> None:
        self._selector.unregister(end)
        end.close()


class RealStage:
    """Processes that are forked from one that has imported ZeroMQ."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._processes: list[RealProcess] = []
        self._lines: list[_RealLine] = []
        self._listening: dict[str, socket.socket] = {}
        self._folder = tempfile.TemporaryDirectory()

    def process(self, *listening: str) -> RealProcess:
        ours, theirs = socket.socketpair()
        sockets = [theirs, *(self._listening[name] for name in listening)]
        names = ",".join(["control", *listening])
        socket.send_fds(self._door, [names.encode()], [each.fileno() for each in sockets])
        theirs.close()
        pid = int.from_bytes(self._door.recv(8), "little")
        made = RealProcess(self, Connection(ours.detach()), pid)
        self._processes.append(made)
        return made

    def url(self) -> str:
        return f"tcp://127.0.0.1:{free_port()}"

    def ipc(self) -> str:
        return f"ipc://{self._folder.name}/socket"

    def listen(self, name: str) -> str:
        # A port at which no other program listens later.
        self._listening[name] = socket.create_server(("127.0.0.1", free_port()))
        self._listening[name].setblocking(False)
        return f"tcp://127.0.0.1:{self._listening[name].getsockname()[1]}"

    def leave(self, name: str) -> None:
        self._listening.pop(name).close()

    def line(self, url: str) -> _RealLine:
        self._lines.append(_RealLine(url))
        return self._lines[-1]

    def pause(self) -> None:
        os.sched_yield()

    def close(self) -> None:
        for process in self._processes:
            process.close()
        for line in self._lines:
            line.close()
        for each in self._listening.values():
            each.close()
        self._folder.cleanup()


@contextmanager
def real_zeromq() -> Iterator[Callable[[Callable[[Any], Any]], Any]]:
    """Within, scripts can be run on real ZeroMQ."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.simulated.zeromq_sockets", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as origin, ours:
        theirs.close()

        def run(script: Callable[[Any], Any]) -> Any:
            stage = RealStage(ours)
            try:
                return script(stage)
            finally:
                stage.close()

        yield run
        ours.close()
        origin.wait()


# The model.
class ModelWorld(kernel.World):
    """Two hosts: one has all processes and is reached under two addresses."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.socks_to_break: list[Any] = []
        for name, address in (("here", "10.0.0.1"), ("there", "10.0.0.2")):
            self.hosts[name] = kernel.Host(name, address)

    def host_of_url(self, url: str) -> str:
        address = url.removeprefix("tcp://").rpartition(":")[0]
        return next(host.name for host in self.hosts.values() if host.address == address)

    def all_sockets(self) -> list[Any]:
        processes = [each for each in self.procs.values() if each.alive]
        return [one for each in processes for c in each.contexts for one in c.sockets]


class ModelProcess(_Process):
    def __init__(self, stage: ModelStage, listening: tuple[str, ...]) -> None:
        self.stage = stage
        self._asked: list[tuple[Any, ...]] = []
        self._answers: list[tuple[str, Any]] = []
        self._source, self._answered = kernel.Source(), kernel.Source()
        world = stage.world
        files = [stage.listening[name] for name in listening]
        numbers = dict(zip(listening, range(10, 20), strict=False))
        self._numbers = numbers
        fds = dict(zip(numbers.values(), files, strict=True))
        self.process = world.spawn("peer", world.hosts["here"], self._serve, fds=fds)

    def _serve(self) -> None:
        sockets = Sockets(zeromq, zeromq.recv_monitor_message, self._numbers)
        while True:
            self.stage.world.block(lambda: bool(self._asked), [self._source])
            name, *arguments = self._asked.pop(0)
            self._answers.append(sockets.call(name, *arguments))
            self._answered.notify()

    def call(self, name: str, *arguments: Any) -> Any:
        self._asked.append((name, *arguments))
        self._source.notify()
        self.stage.world.block(lambda: bool(self._answers), [self._answered])
        return _result(self._answers.pop(0))

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)

    def stop(self) -> None:
        self.process.freeze(_STOPPED_SECONDS)
        zeromq.on_frozen_server(self.stage.world, self.process, _STOPPED_SECONDS)

    def go_on(self) -> None:
        world, process = self.stage.world, self.process
        world.block(lambda: False, [], max(0.0, process.frozen_until - world.now))


#: The model stops a process for a time that it names.
_STOPPED_SECONDS = 20.0


class _ModelLine:
    def __init__(self, world: ModelWorld, url: str) -> None:
        self._world, self.url = world, url

    def _connections(self) -> list[Any]:
        ends = [one.conn for one in self._world.all_sockets()]
        return [each for each in ends if each is not None and set(each.hosts) == {"here", "there"}]

    def hold(self) -> None:
        self._world.partition("here", "there", 1e6)

    def await_sent(self) -> None:
        self._world.block(lambda: any(any(c.flight) for c in self._connections()), [], 1.0)
        assert any(any(each.flight) for each in self._connections())

    def release(self) -> None:
        for pair in (("here", "there"), ("there", "here")):
            self._world.blocked[pair] = 0.0
        zeromq.on_heal(self._world, "here", "there")

    def cut(self) -> None:
        for each in self._connections():
            each.flight = [[], []]
            each.break_client()
            each.drop_server()
        self.release()


class ModelStage:
    def __init__(self, world: ModelWorld) -> None:
        self.world = world
        self.listening: dict[str, Any] = {}
        self._ports = iter(range(5000, 6000))

    def process(self, *listening: str) -> ModelProcess:
        return ModelProcess(self, listening)

    def url(self) -> str:
        return f"tcp://10.0.0.2:{next(self._ports)}"

    def ipc(self) -> str:
        return "ipc:///folder/socket"

    def listen(self, name: str) -> str:
        url = self.url()
        listener = self.world.listeners[url] = kernel.Listener(url)
        self.listening[name] = listener.incref()
        return url

    def leave(self, name: str) -> None:
        self.listening.pop(name).decref()

    def line(self, url: str) -> _ModelLine:
        return _ModelLine(self.world, url)

    def pause(self) -> None:
        self.world.block(lambda: False, [], 0.001)


def run_on_model(script: Callable[[Any], Any], seed: int = 1) -> Any:
    """Runs a script on the model; the seed decides about delays."""
    world = ModelWorld(seed)
    found: list[Any] = []
    ended = [False]

    def main() -> None:
        try:
            found.append(script(ModelStage(world)))
        finally:
            ended[0] = True

    world.spawn("script", world.hosts["here"], main)
    problem = world.run(lambda: ended[0], 3600.0)
    if world.crashes:
        raise AssertionError(world.crashes[0][-1])
    assert not problem, problem
    return found[0]
