"""Simulated ``socket`` and ``selectors``: streams between processes of a host, and ports."""

from __future__ import annotations

import errno
import io
import select as real_select
import selectors as real_selectors
import socket as real_socket
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.simulated.kernel import End, File, Listener, Process, World, stream_pair


def this_process() -> Process:
    """Returns the process whose thread runs."""
    thread = World.it.thread
    assert thread is not None
    return thread.proc


class Module(ModuleType):
    """A module with some names of its own; all others are the real module's."""

    def __init__(self, real: ModuleType, **own: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(vars(real))
        self.__dict__.update(own)


class PipeFile:
    """A file object of a pipe or a socket, without a buffer for what is written."""

    def __init__(self, process: Process, end: End, fd: int = -1) -> None:
        self._process, self._end = process, end
        #: One that a socket has made does not close the socket's descriptor.
        self._owns = fd < 0
        self._fd = process.add(end) if fd < 0 else fd
        self._buffer, self.closed = b"", False

    def fileno(self) -> int:
        return self._fd

    def write(self, data: bytes) -> int:
        if self.closed:
            raise ValueError("write to closed file")
        write_all(self._end, data)
        return len(data)

    def flush(self) -> None: ...

    def read(self, nbytes: int = -1) -> bytes:
        while nbytes < 0 or len(self._buffer) < nbytes:
            part = self._end.read(65536 if nbytes < 0 else nbytes - len(self._buffer))
            if not part:
                break
            self._buffer += part
        found = self._buffer if nbytes < 0 else self._buffer[:nbytes]
        self._buffer = self._buffer[len(found) :]
        return found

    def readline(self) -> bytes:
        while b"\n" not in self._buffer:
            part = self._end.read(65536)
            if not part:
                line, self._buffer = self._buffer, b""
                return line
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line + b"\n"

    def __iter__(self) -> PipeFile:
        return self

    def __next__(self) -> bytes:
        if line := self.readline():
            return line
        raise StopIteration

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self._owns and self._process.fds.get(self._fd) is self._end:
                self._process.close(self._fd)

    def __enter__(self) -> PipeFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_all(end: End, data: bytes) -> None:
    data = bytes(data)
    while data:
        data = data[end.write(data, this_process()) :]


class Socket:
    """A socket of a process: one end of a stream, or one that listens."""

    def __init__(
        self, family: int = -1, kind: int = -1, proto: int = -1, fileno: int | None = None
    ) -> None:
        self._process = this_process()
        self._fd = -1 if fileno is None else fileno
        self._file: Any = None if fileno is None else self._process.fds[fileno]
        self._timeout: float | None = None
        self._closed = False

    def _take(self, file: File) -> Socket:
        self._file, self._fd = file, self._process.add(file)
        return self

    @property
    def peer(self) -> Process | None:
        """The process at the other end."""
        return self._file.peer  # type: ignore[no-any-return]

    def bind(self, path: str) -> None:
        where = self._process.host.name, path
        self._take(Listener(where))
        World.it.listeners[where] = self._file

    def listen(self, backlog: int = 0) -> None: ...

    def accept(self) -> tuple[Socket, None]:
        if not self._file.queue:
            World.it.block(self._file.readable, [self._file.source])
        return Socket()._take(self._file.queue.pop(0)), None

    def connect(self, path: str) -> None:
        listener = World.it.listeners.get((self._process.host.name, path))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        mine, theirs = stream_pair()
        theirs.peer, mine.timeout = self._process, self._timeout
        self._take(mine)
        listener.queue.append(theirs)
        listener.source.notify()

    def fileno(self) -> int:
        return self._fd

    def gettimeout(self) -> float | None:
        return self._timeout

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds
        if self._file is not None:
            self._file.timeout = seconds

    def setblocking(self, on: bool) -> None:
        if self._file is not None:
            self._file.blocking = on

    def sendall(self, data: bytes) -> None:
        write_all(self._file, data)

    def send(self, data: bytes, flags: int = 0) -> int:
        return int(self._file.write(bytes(data), this_process()))

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        return bytes(self._file.read(nbytes, peek=bool(flags & real_socket.MSG_PEEK)))

    def makefile(self, mode: str = "r") -> PipeFile:
        return PipeFile(self._process, self._file, self._fd)

    def shutdown(self, how: int) -> None:
        self._file.closed()

    def close(self) -> None:
        if not self._closed and self._fd >= 0:
            self._closed = True
            if self._process.fds.get(self._fd) is self._file:
                self._process.close(self._fd)

    def detach(self) -> int:
        self._closed = True
        return self._fd

    def getsockname(self) -> tuple[str, int]:
        address, _, port = self._file.where.removeprefix("tcp://").rpartition(":")
        return address, int(port)

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _recv_fds(
    one: Socket, nbytes: int, most: int, flags: int = 0
) -> tuple[bytes, list[int], int, None]:
    data = one._file.read(nbytes)
    files, one._file.reads.fds = one._file.reads.fds, []
    found = [this_process().add(file) for file in files]
    for file in files:
        file.decref()  # the message had it until now
    return data, found, 0, None


def _send_fds(one: Socket, parts: Sequence[bytes], fds: Sequence[int]) -> None:
    one._file.writes.fds = [this_process().fds[fd].incref() for fd in fds]
    one.sendall(b"".join(parts))


def _socketpair() -> tuple[Socket, Socket]:
    mine, other = stream_pair()
    return Socket()._take(mine), Socket()._take(other)


def _create_connection(address: tuple[str, int], timeout: float | None = None) -> SimpleNamespace:
    world = World.it
    host, port = address
    there, here = world.host_of_address(host), this_process().host.name
    if world.cut(here, there):
        world.block(lambda: False, [], timeout)
        raise TimeoutError("timed out")
    world.block(lambda: False, [], 2 * world.delay(here, there))
    if f"tcp://{host}:{port}" not in world.listeners:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    return SimpleNamespace(close=lambda: None)


def _create_server(address: tuple[str, int], family: int = -1, **_: object) -> Socket:
    host, port = address
    here = this_process().host
    where = f"tcp://{host or here.address}:{port or next(here.ports)}"
    if where in World.it.listeners:
        raise OSError(errno.EADDRINUSE, "Address already in use")
    listener = World.it.listeners[where] = Listener(where)
    return Socket()._take(listener)


socket = Module(
    real_socket,
    socket=Socket,
    recv_fds=_recv_fds,
    send_fds=_send_fds,
    socketpair=_socketpair,
    create_connection=_create_connection,
    create_server=_create_server,
    gethostname=lambda: this_process().host.name,
)


def _events(file: File) -> int:
    reads = real_selectors.EVENT_READ if file.readable() else 0
    writes = real_selectors.EVENT_WRITE if isinstance(file, End) and file.writable() else 0
    return reads | writes


class DefaultSelector:
    """Waits for files of this process; a signal ends the wait."""

    def __init__(self) -> None:
        self._map: dict[int, Any] = {}

    @staticmethod
    def _fd(file: Any) -> int:
        return file if isinstance(file, int) else int(file.fileno())

    def register(self, file: Any, events: int, data: Any = None) -> None:
        fd = self._fd(file)
        if fd in self._map:
            raise KeyError(f"{fd} is already registered")
        self._map[fd] = SimpleNamespace(fileobj=file, fd=fd, events=events, data=data)

    def unregister(self, file: Any) -> Any:
        return self._map.pop(self._fd(file))

    def modify(self, file: Any, events: int, data: Any = None) -> None:
        self._map[self._fd(file)].events = events

    def get_key(self, file: Any) -> Any:
        return self._map[self._fd(file)]

    def get_map(self) -> dict[int, Any]:
        return self._map

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        process = this_process()
        keys = [(key, process.fds[fd]) for fd, key in self._map.items() if fd in process.fds]

        def ready() -> list[tuple[Any, int]]:
            found = ((key, _events(file) & key.events) for key, file in keys)
            return [(key, events) for key, events in found if events]

        sources = [file.source for _, file in keys]
        ends = [file for _, file in keys if isinstance(file, End)]
        sources += [end.writes.source for end in ends if end.writes is not None]
        return World.it.block(ready, [*sources, process.child_ended], timeout) or []

    def close(self) -> None:
        self._map = {}

    def __enter__(self) -> DefaultSelector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


selectors = Module(real_selectors, DefaultSelector=DefaultSelector)


def _select(
    readers: Sequence[int], writers: object, errors: object, timeout: float | None = None
) -> tuple[list[int], list[int], list[int]]:
    process = this_process()
    files = [(fd, process.fds[fd]) for fd in readers]
    found = World.it.block(
        lambda: [fd for fd, file in files if file.readable()],
        [*(file.source for _, file in files), process.child_ended],
        timeout,
    )
    return found or [], [], []


select = Module(real_select, select=_select)


class KeptFile(io.BytesIO):
    """A file that is written: its host has it once it is closed."""

    def __init__(self, files: dict[str, bytes], name: str) -> None:
        super().__init__()
        self._files, self._name = files, name

    def close(self) -> None:
        if not self.closed:
            self._files[self._name] = self.getvalue()
        super().close()


def open_file(name: object, mode: str = "r", **_: object) -> Any:
    """Stands for the builtin ``open``: files of the host."""
    files = this_process().host.files
    if "w" in mode or "a" in mode:
        kept = KeptFile(files, str(name))
        return kept if "b" in mode else io.TextIOWrapper(kept, write_through=True)
    if str(name) not in files:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
    data = files[str(name)]
    return io.BytesIO(data) if "b" in mode else io.StringIO(data.decode())
