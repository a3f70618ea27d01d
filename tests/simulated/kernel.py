"""One process that is a world: virtual clock, hosts, processes, threads, files and network.

Each thread is a greenlet; the world resumes one at a time, at moments that its seed decides. So a
run is a function of its seed. Nothing here is about allranks.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal as real_signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import greenlet

INF = float("inf")
#: Of a pipe.
CAPACITY = 65536
_BEGIN = 1000.0
#: Between the event that a thread waits for and the moment at which it goes on.
_LATENCY_SECONDS = 0.0015


class Source:
    """What threads wait for: `notify` resumes all that do."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        #: A set in the order of arrival.
        self.waiters: dict[Thread, None] = {}

    def notify(self) -> None:
        if not self.waiters:
            return
        world = World.it
        for thread in self.waiters:
            moment = world.now + world.latency()
            if moment < thread.goes_on:  # else something resumes it before
                thread.goes_on = moment
                world.at(moment, world.resume, thread, thread.token)


class WorldOver(BaseException):
    """The run has ended: greenlets that are left must not go on."""


class World:
    """The clock, the events to come, and all hosts and processes.

    ``rng`` decides the latencies of scheduling and network. With ``preempt``, a thread also loses
    the processor at that share of its calls of the system.
    """

    it: ClassVar[World]

    def __init__(self, seed: int, preempt: float = 0.0) -> None:
        World.it = self
        self.seed, self.rng, self.preempt = seed, random.Random(seed), preempt
        self.now = _BEGIN
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        self.hosts: dict[str, Host] = {}
        self.procs: dict[int, Process] = {}
        self.pids = itertools.count(100)
        #: The thread that runs; None while the world decides which one is next.
        self.thread: Thread | None = None
        self.hub = greenlet.getcurrent()
        self.over = False
        #: Threads that an exception has ended: process, thread, traceback.
        self.crashes: list[tuple[str, str, str]] = []
        self.trace: list[str] = []
        self.tracing = False
        #: Until when the network between two hosts is interrupted.
        self.blocked: dict[tuple[str, str], float] = {}
        #: Sockets that listen, by path or URL.
        self.listeners: dict[Any, Listener] = {}
        #: Connections that break as soon as the network lets the other end find out.
        self.socks_to_break: list[Any] = []
        self.steps = 0
        #: When the clock was read last, and how often at this moment: see `tests.simulated.system`.
        self.looked_at, self.looks = 0.0, 0
        #: Greenlets must not be collected while the world runs.
        self.threads: list[Thread] = []

    def log(self, *what: object) -> None:
        if self.tracing:
            self.trace.append(f"{self.now - _BEGIN:9.4f} " + " ".join(map(str, what)))

    # Time.

    def at(self, moment: float, action: Callable[..., object], *arguments: Any) -> None:
        heapq.heappush(self._events, (moment, next(self._sequence), action, arguments))

    def after(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:
        self.at(self.now + seconds, action, *arguments)

    def latency(self) -> float:
        """Returns a delay of the operating system's scheduler."""
        return self.rng.random() * _LATENCY_SECONDS

    def run(self, done: Callable[[], object], limit: float) -> str:
        """Lets the world go on until ``done``, for ``limit`` seconds; returns why it was not."""
        end, events, pop = self.now + limit, self._events, heapq.heappop
        while not done():
            if not events:
                return "nothing is left to happen"
            moment, _, action, arguments = pop(events)
            if moment > end:
                self.at(moment, action, *arguments)
                self.now = end
                return "the time is over"
            if moment > self.now:
                self.now = moment
            self.steps += 1
            action(*arguments)
        return ""

    # Threads.

    def resume(self, thread: Thread, token: int) -> None:
        """Lets a thread go on, unless something else has resumed it already."""
        if thread.token != token or thread.done or not thread.proc.alive:
            return
        if thread.proc.frozen_until > self.now:
            self.at(thread.proc.frozen_until, self.resume, thread, token)
            return
        thread.token += 1
        thread.goes_on = INF
        before, self.thread = self.thread, thread
        thread.g.switch()
        self.thread = before

    def block(
        self, ready: Callable[[], Any], sources: Sequence[Source], timeout: float | None = None
    ) -> Any:
        """Makes the thread wait until ``ready`` is true after one of the sources was notified.

        Returns what ``ready`` has returned; after ``timeout`` seconds that is false.
        """
        thread = self.thread
        if thread is None or self.over:
            raise WorldOver
        deadline = None if timeout is None else self.now + timeout
        while True:
            found = ready()
            if found or (deadline is not None and self.now >= deadline):
                return found
            for source in sources:
                source.waiters[thread] = None
            if deadline is not None:
                thread.goes_on = deadline
                self.at(deadline, self.resume, thread, thread.token)
            self._switch()
            for source in sources:
                source.waiters.pop(thread, None)
            if thread.raises is not None:
                error, thread.raises = thread.raises, None
                raise error

    def yield_point(self) -> None:
        """A call of the system, at which the thread may lose the processor."""
        thread = self.thread
        if self.preempt and thread is not None and self.rng.random() < self.preempt:
            self.after(self.latency(), self.resume, thread, thread.token)
            self._switch()

    def _switch(self) -> None:
        self.hub.switch()
        if self.over:
            raise WorldOver

    def waits(self) -> str:
        """Returns where each living thread waits, for a report."""
        lines = []
        for thread in self.threads:
            frame = thread.g.gr_frame if thread.proc.alive and not thread.done else None
            places = []
            while frame is not None:
                name = frame.f_code.co_filename
                if "/allranks/" in name or name.endswith("/models.py"):
                    places.append(f"{name.rpartition('/')[2]}:{frame.f_lineno}")
                frame = frame.f_back
            if places:
                lines.append(f"{thread.proc}/{thread.name}: {' < '.join(places[:3])}")
        return "Threads wait:\n    " + "\n    ".join(lines) if lines else "No thread waits"

    def spawn(
        self,
        name: str,
        host: Host,
        main: Callable[[], object],
        parent: Process | None = None,
        fds: Mapping[int, File] | None = None,
        environ: Mapping[str, str] | None = None,
        pdeath: bool = False,
    ) -> Process:
        """Starts a process; with ``pdeath`` it is killed when its parent ends."""
        process = Process(self, name, host, parent)
        process.fds = dict(fds or {})
        for file in process.fds.values():
            file.incref()
        process.environ = dict(environ or {})
        process.pdeath = pdeath
        Thread(process, main, "main")
        return process

    # Network.

    def host_of_address(self, address: str) -> str:
        return next(host.name for host in self.hosts.values() if host.address == address)

    def host_of_url(self, url: str) -> str:
        return self.host_of_address(url.removeprefix("tcp://").rpartition(":")[0])

    def all_sockets(self) -> list[Any]:
        """Returns ZeroMQ's sockets of all living processes."""
        living = [process for process in self.procs.values() if process.alive]
        return [one for each in living for context in each.contexts for one in context.sockets]

    def cut(self, a: str, b: str) -> bool:
        """Whether the network between two hosts is interrupted now."""
        return self.blocked.get((a, b), 0) > self.now

    def partition(self, a: str, b: str, seconds: float) -> None:
        """Interrupts the network between two hosts."""
        until = self.now + seconds
        for pair in ((a, b), (b, a)):
            self.blocked[pair] = max(until, self.blocked.get(pair, 0))
        self.log("PARTITION", a, b, f"{seconds:.2f}")
        from tests.simulated import zeromq

        zeromq.on_partition(self, a, b, until)
        self.after(seconds + 1e-6, zeromq.on_heal, self, a, b)

    def delay(self, a: str, b: str) -> float:
        """Returns how long a message takes. Seldom TCP has to send it again."""
        if a == b:
            return 2e-5 + self.rng.random() * 3e-4
        return 2e-4 + self.rng.random() * 1.5e-3 + (0.2 if self.rng.random() < 0.002 else 0)


class Thread:
    """A thread of a process. With its first one, the main thread, the process ends."""

    def __init__(self, proc: Process, fn: Callable[[], object], name: str = "thread") -> None:
        self.proc, self.fn, self.name = proc, fn, name
        self.done = False
        #: Counts how often it was resumed: an event for an earlier wait does not count.
        self.token = 0
        #: When a notification or its deadline resumes it, if nothing does so before.
        self.goes_on = INF
        #: What is raised where it waits.
        self.raises: BaseException | None = None
        self.ended = Source()
        world = World.it
        self.g = greenlet.greenlet(self._main, parent=world.hub)
        proc.threads.append(self)
        world.threads.append(self)
        world.after(world.latency(), world.resume, self, self.token)

    def _main(self) -> None:
        world, code = World.it, 1
        try:
            self.fn()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except WorldOver:
            return
        except BaseException:
            if not world.over:
                world.crashes.append((self.proc.name, self.name, traceback.format_exc()))
        self.done = True
        self.ended.notify()
        if self is self.proc.threads[0]:
            self.proc.die(code)


class Host:
    """A machine: its files, and its next free port. The names of folders end with a slash."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.files: dict[str, bytes] = {}
        self.ports = itertools.count(50000)


class Process:
    """A process with descriptors, environment, signal handlers and children."""

    def __init__(self, world: World, name: str, host: Host, parent: Process | None) -> None:
        self.world, self.name, self.host = world, name, host
        self.pid = next(world.pids)
        world.procs[self.pid] = self
        self.parent = parent
        self.children: list[Process] = []
        self.zombies: list[Process] = []
        if parent is not None:
            parent.children.append(self)
        self.alive, self.code = True, 0
        #: Its threads, and the ones of ZeroMQ, stand still until then.
        self.frozen_until = self.frozen_io_until = 0.0
        self.fds: dict[int, File] = {}
        self.environ: dict[str, str] = {}
        self.handlers: dict[int, Any] = {}
        #: The descriptor to which signals are written.
        self.wakeup = -1
        self.threads: list[Thread] = []
        self.subreaper = self.pdeath = False
        self.child_ended, self.ended = Source(), Source()
        #: Contexts of ZeroMQ.
        self.contexts: list[Any] = []
        self.on_death: list[Callable[[Process], object]] = []
        #: How many signals its handlers have taken.
        self.interrupted = 0
        self.started = world.now
        #: The rank that it is; -1 if it is none.
        self.rank = -1

    def __repr__(self) -> str:
        return f"{self.name}@{self.host.name}[{self.pid}]"

    def add(self, file: File, fd: int | None = None) -> int:
        """Gives it a file as a descriptor: that number, or the lowest free one."""
        if fd is None:
            fd = next(number for number in itertools.count(3) if number not in self.fds)
        file.incref()
        old = self.fds.get(fd)
        self.fds[fd] = file
        if old is not None:
            old.decref()
        return fd

    def close(self, fd: int) -> None:
        file = self.fds.pop(fd, None)
        if file is None:
            raise OSError(9, "Bad file descriptor")
        file.decref()

    def freeze(self, seconds: float, io: bool = True) -> None:
        """Stops it for a time; without ``io`` ZeroMQ's own threads go on."""
        self.frozen_until = max(self.frozen_until, self.world.now + seconds)
        if io:
            self.frozen_io_until = max(self.frozen_io_until, self.world.now + seconds)

    def signal(self, number: int) -> None:
        if not self.alive:
            return
        if number == real_signal.SIGKILL:
            self.die(-9)
            return
        handler = self.handlers.get(number)
        if handler is None:
            self._without_handler(number)
        elif handler not in (real_signal.SIG_IGN, 1):
            if self.frozen_until > self.world.now:
                self.world.at(self.frozen_until, self.signal, number)
                return
            self._handle(number, handler)

    def _without_handler(self, number: int) -> None:
        if number == real_signal.SIGINT:
            thread = self.threads[0]
            thread.raises = KeyboardInterrupt()
            self.world.resume(thread, thread.token)
        elif number != real_signal.SIGCHLD:
            self.die(-number)

    def _handle(self, number: int, handler: Callable[[int, None], object]) -> None:
        self.interrupted += 1
        if isinstance(pipe_end := self.fds.get(self.wakeup), End):
            pipe_end.write_some(bytes([number]))
        before, self.world.thread = self.world.thread, self.threads[0]
        try:
            handler(number, None)
        finally:
            self.world.thread = before
        self.child_ended.notify()

    def die(self, code: int) -> None:
        """Ends it at once: its descriptors and sockets close, its children get another parent."""
        if not self.alive:
            return
        world = self.world
        self.alive, self.code = False, code
        world.log("END", self, code)
        for fd in sorted(self.fds):
            self.fds.pop(fd).decref()
        for context in self.contexts:
            context.process_died()
        for child in list(self.children):
            if child.alive:
                self._leave(child)
        if self.parent is not None and self.parent.alive:
            self.parent.zombies.append(self)
            self.parent.child_ended.notify()
            self.parent.signal(real_signal.SIGCHLD)
        self.ended.notify()
        for action in self.on_death:
            action(self)
        if world.thread is not None and world.thread.proc is self:
            world.hub.switch()  # never resumed

    def _leave(self, child: Process) -> None:
        if child.pdeath:
            self.world.after(self.world.latency(), child.signal, real_signal.SIGKILL)
        heir = self.parent
        while heir is not None and not (heir.alive and heir.subreaper):
            heir = heir.parent
        child.parent = heir
        if heir is not None:
            heir.children.append(child)

    def reap(self, pid: int = -1) -> Process | None:
        """Returns an ended child, which is forgotten then."""
        for zombie in self.zombies:
            if pid in (-1, zombie.pid):
                self.zombies.remove(zombie)
                self.children.remove(zombie)
                return zombie
        return None


class File:
    """What a descriptor stands for; here one that is never readable and takes all: /dev/null."""

    def __init__(self) -> None:
        self.refs = 0
        self.source = Source()

    def incref(self) -> File:
        self.refs += 1
        return self

    def decref(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.closed()

    def closed(self) -> None: ...

    def readable(self) -> bool:
        return False

    def write(self, data: bytes, process: Process) -> int:
        return len(data)


class Buffer:
    """What is on the way from one end to the other, with descriptors that are passed along."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.has_writer = self.has_reader = True
        self.source = Source()
        self.fds: list[File] = []


class End(File):
    """An end of a pipe or of a stream socket."""

    def __init__(self, reads: Buffer | None = None, writes: Buffer | None = None) -> None:
        super().__init__()
        self.reads, self.writes = reads, writes
        self.blocking = True
        #: The process at the other end of a socket.
        self.peer: Process | None = None
        self.timeout: float | None = None
        if reads is not None:
            self.source = reads.source

    def closed(self) -> None:
        if self.reads is not None:
            self.reads.has_reader = False
            self.reads.source.notify()
        if self.writes is not None:
            self.writes.has_writer = False
            self.writes.source.notify()

    def readable(self) -> bool:
        return bool(self.reads is not None and (self.reads.data or not self.reads.has_writer))

    def writable(self) -> bool:
        writes = self.writes
        return writes is not None and (len(writes.data) < CAPACITY or not writes.has_reader)

    def read(self, nbytes: int, peek: bool = False) -> bytes:
        assert self.reads is not None
        if not self.readable():
            if not self.blocking:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            if not World.it.block(self.readable, [self.reads.source], self.timeout):
                raise TimeoutError("timed out")
        data = bytes(self.reads.data[:nbytes])
        if not peek:
            del self.reads.data[:nbytes]
            self.reads.source.notify()
        return data

    def write_some(self, data: bytes) -> int:
        if self.writes is None or not self.writes.has_reader:
            raise BrokenPipeError(32, "Broken pipe")
        count = min(len(data), CAPACITY - len(self.writes.data))
        self.writes.data += data[:count]
        if count:
            self.writes.source.notify()
        return count

    def write(self, data: bytes, process: Process) -> int:
        """Writes as write(2) does: a signal that a handler takes ends it with a short count."""
        count = self.write_some(data)
        assert self.writes is not None
        writes = self.writes
        while count < len(data):
            if not self.blocking:
                if count:
                    return count
                raise BlockingIOError(11, "Resource temporarily unavailable")
            seen = process.interrupted

            def ready(seen: int = seen) -> bool:
                return self.writable() or process.interrupted != seen

            World.it.block(ready, [writes.source, process.child_ended])
            if process.interrupted != seen and count:
                return count
            count += self.write_some(data[count:])
        return count


def pipe() -> tuple[End, End]:
    """Returns the end to read, and the one to write."""
    buffer = Buffer()
    return End(reads=buffer), End(writes=buffer)


def stream_pair() -> tuple[End, End]:
    a, b = Buffer(), Buffer()
    return End(a, b), End(b, a)


class Listener(File):
    """A socket that listens: ``where`` is its URL, or its host and path."""

    def __init__(self, where: Any) -> None:
        super().__init__()
        self.where = where
        self.queue: list[End] = []
        #: The socket of ZeroMQ that accepts.
        self.acceptor: Any = None

    def readable(self) -> bool:
        return bool(self.queue)

    def closed(self) -> None:
        world = World.it
        if world.listeners.get(self.where) is self:
            del world.listeners[self.where]
