"""One process that is a world: virtual clock, hosts, processes, threads (greenlets), files, network.

Nothing here knows allranks. A run is a function of its seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal as real_signal
import traceback

import greenlet

INF = float("inf")


class Source:
    """What threads wait for."""

    __slots__ = ("waiters",)

    def __init__(self):
        self.waiters = {}

    def notify(self):
        w = World.it
        for th, token in list(self.waiters.items()):
            w.after(w.latency(), w.resume, th, th.token)


class WorldOver(BaseException):
    pass


class World:
    it: World = None

    def __init__(self, seed, preempt=0.0):
        World.it = self
        self.seed, self.rng = seed, random.Random(seed)
        self.now = 1000.0
        self.heap, self.seq = [], itertools.count()
        self.hosts = {}
        self.procs = {}
        self.pids = itertools.count(100)
        self.thread = None
        self.hub = greenlet.getcurrent()
        self.over = False
        self.preempt = preempt
        self.crashes = []  # threads that ended by an exception
        self.trace = []
        self.tracing = False
        self.blocked = {}  # (host, host) -> until
        self.steps = 0
        self.looked_at, self.looks = 0.0, 0
        self.keep = []
        self.listeners = {}
        self.socks = []

    def log(self, *what):
        if self.tracing:
            self.trace.append(f"{self.now - 1000:9.4f} " + " ".join(map(str, what)))

    def at(self, t, fn, *args):
        heapq.heappush(self.heap, (t, next(self.seq), fn, args))

    def after(self, dt, fn, *args):
        heapq.heappush(self.heap, (self.now + dt, next(self.seq), fn, args))

    def latency(self):
        # Of the scheduler of an operating system.
        return self.rng.random() * 0.0015

    def run(self, done, limit):
        end = self.now + limit
        while not done():
            if not self.heap:
                return "nothing left to happen"
            t, _, fn, args = heapq.heappop(self.heap)
            if t > end:
                self.at(t, fn, *args)
                self.now = end
                return "time is over"
            if t > self.now:
                self.now = t
            self.steps += 1
            fn(*args)
        return ""

    def resume(self, th, token):
        if th.token != token or th.done or not th.proc.alive:
            return
        if th.proc.frozen_until > self.now:
            self.at(th.proc.frozen_until, self.resume, th, token)
            return
        th.token += 1
        before, self.thread = self.thread, th
        th.g.switch()
        self.thread = before

    def block(self, ready, sources, timeout=None):
        th = self.thread
        if th is None or self.over:
            raise WorldOver
        deadline = None if timeout is None else self.now + timeout
        while True:
            found = ready()
            if found or (deadline is not None and self.now >= deadline):
                return found
            for s in sources:
                s.waiters[th] = th.token
            if deadline is not None:
                self.at(deadline, self.resume, th, th.token)
            self.hub.switch()
            if self.over:
                raise WorldOver
            for s in sources:
                s.waiters.pop(th, None)
            if th.raises is not None:
                error, th.raises = th.raises, None
                raise error

    def yield_point(self):
        th = self.thread
        if self.preempt and th is not None and self.rng.random() < self.preempt:
            self.after(self.latency(), self.resume, th, th.token)
            self.hub.switch()
            if self.over:
                raise WorldOver

    def spawn(self, name, host, main, parent=None, fds=None, environ=None, pdeath=False):
        p = Process(self, name, host, parent)
        p.fds = dict(fds or {})
        for f in p.fds.values():
            f.incref()
        p.environ = dict(environ or {})
        p.pdeath = pdeath
        p.start_main(main)
        return p

    # network
    def cut(self, a, b):
        return self.blocked.get((a, b), 0) > self.now

    def partition(self, a, b, seconds):
        until = self.now + seconds
        for pair in ((a, b), (b, a)):
            self.blocked[pair] = max(until, self.blocked.get(pair, 0))
        self.log("PARTITION", a, b, f"{seconds:.2f}")
        from tests.simulated import zeromq

        zeromq.on_partition(self, a, b, until)
        self.after(seconds + 1e-6, zeromq.on_heal, self, a, b)

    def delay(self, a, b):
        if a == b:
            return 2e-5 + self.rng.random() * 3e-4
        return 2e-4 + self.rng.random() * 1.5e-3 + (0.2 if self.rng.random() < 0.002 else 0)


class Thread:
    def __init__(self, proc, fn, name="thread"):
        self.proc, self.fn, self.name = proc, fn, name
        self.done = False
        self.token = 0
        self.raises = None
        self.ended = Source()
        w = World.it
        self.g = greenlet.greenlet(self._main, parent=w.hub)
        proc.threads.append(self)
        w.keep.append(self)
        w.after(w.latency(), w.resume, self, self.token)

    def _main(self):
        w = World.it
        code = None
        try:
            self.fn()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except WorldOver:
            return
        except BaseException:
            code = 1
            if not w.over:
                w.crashes.append((self.proc.name, self.name, traceback.format_exc()))
        self.done = True
        self.ended.notify()
        if self is self.proc.threads[0]:
            self.proc.die(code)


class Host:
    def __init__(self, name, address):
        self.name, self.address = name, address
        self.files = {}  # path -> bytes; folders end with /
        self.doors = {}  # AF_UNIX path -> Listener
        self.ports = itertools.count(50000)


class Process:
    def __init__(self, world, name, host, parent):
        self.world, self.name, self.host = world, name, host
        self.pid = next(world.pids)
        world.procs[self.pid] = self
        self.parent = parent
        self.children, self.zombies = [], []
        if parent is not None:
            parent.children.append(self)
        self.alive, self.code = True, None
        self.frozen_until = 0.0
        self.frozen_io_until = 0.0
        self.fds, self.environ = {}, {}
        self.handlers, self.wakeup = {}, -1
        self.threads = []
        self.subreaper = self.pdeath = False
        self.child_ended = Source()
        self.ended = Source()
        self.contexts = []
        self.on_death = []
        self.interrupted = 0
        self.started = world.now

    def start_main(self, main):
        Thread(self, main, "main")

    def __repr__(self):
        return f"{self.name}@{self.host.name}[{self.pid}]"

    # files
    def add(self, file, fd=None):
        if fd is None:
            fd = next(n for n in itertools.count(3) if n not in self.fds)
        file.incref()
        old = self.fds.get(fd)
        self.fds[fd] = file
        if old is not None:
            old.decref()
        return fd

    def close(self, fd):
        file = self.fds.pop(fd, None)
        if file is None:
            raise OSError(9, "Bad file descriptor")
        file.decref()

    def freeze(self, seconds, io=True):
        self.frozen_until = max(self.frozen_until, self.world.now + seconds)
        if io:
            self.frozen_io_until = max(self.frozen_io_until, self.world.now + seconds)

    def signal(self, number):
        if not self.alive:
            return
        if number == real_signal.SIGKILL:
            self.die(-9)
            return
        handler = self.handlers.get(number)
        if handler is None:
            if number in (real_signal.SIGCHLD,):
                return
            if number == real_signal.SIGINT:
                self._raise(KeyboardInterrupt())
                return
            self.die(-number)
            return
        if handler == real_signal.SIG_IGN or handler == 1:
            return
        if self.frozen_until > self.world.now:
            self.world.at(self.frozen_until, self.signal, number)
            return
        self.interrupted += 1
        if self.wakeup in self.fds:
            self.fds[self.wakeup].write_some(b"\0")
        before, self.world.thread = self.world.thread, self.threads[0]
        try:
            handler(number, None)
        finally:
            self.world.thread = before
        self.child_ended.notify()

    def _raise(self, error):
        th = self.threads[0]
        th.raises = error
        self.world.resume(th, th.token)

    def die(self, code):
        if not self.alive:
            return
        w = self.world
        self.alive, self.code = False, code
        w.log("END", self, code)
        for fd in sorted(self.fds):
            self.fds.pop(fd).decref()
        for context in self.contexts:
            context.process_died()
        for child in list(self.children):
            if not child.alive:
                continue
            if child.pdeath:
                w.after(w.latency(), child.signal, real_signal.SIGKILL)
            heir = self.parent
            while heir is not None and not (heir.alive and heir.subreaper):
                heir = heir.parent
            child.parent = heir
            if heir is not None:
                heir.children.append(child)
        if self.parent is not None and self.parent.alive:
            self.parent.zombies.append(self)
            self.parent.child_ended.notify()
            self.parent.signal(real_signal.SIGCHLD)
        self.ended.notify()
        for fn in self.on_death:
            fn(self)
        if w.thread is not None and w.thread.proc is self:
            w.hub.switch()  # never resumed

    def reap(self, pid=None):
        for z in self.zombies:
            if pid in (None, -1, z.pid):
                self.zombies.remove(z)
                self.children.remove(z)
                return z
        return None


class File:
    def __init__(self):
        self.refs = 0
        self.source = Source()

    def incref(self):
        self.refs += 1
        return self

    def decref(self):
        self.refs -= 1
        if self.refs == 0:
            self.closed()

    def closed(self):
        pass

    def readable(self):
        return False


CAPACITY = 65536


class Buffer:
    def __init__(self):
        self.data = bytearray()
        self.has_writer = self.has_reader = True
        self.source = Source()
        self.fds = []


class End(File):
    """An end of a pipe or of a stream socket."""

    def __init__(self, reads=None, writes=None):
        super().__init__()
        self.reads, self.writes = reads, writes
        self.blocking = True
        self.peer = None  # Process at the other end of a socket
        self.timeout = None

    def closed(self):
        if self.reads is not None:
            self.reads.has_reader = False
            self.reads.source.notify()
        if self.writes is not None:
            self.writes.has_writer = False
            self.writes.source.notify()

    def readable(self):
        return bool(self.reads is not None and (self.reads.data or not self.reads.has_writer))

    def read(self, n, peek=False):
        w = World.it
        if not self.readable():
            if not self.blocking:
                raise BlockingIOError(11, "again")
            if not w.block(self.readable, [self.reads.source], self.timeout):
                raise TimeoutError("timed out")
        data = bytes(self.reads.data[:n])
        if not peek:
            del self.reads.data[:n]
            self.reads.source.notify()
        return data

    def write_some(self, data):
        if self.writes is None or not self.writes.has_reader:
            raise BrokenPipeError(32, "Broken pipe")
        n = min(len(data), CAPACITY - len(self.writes.data))
        self.writes.data += data[:n]
        if n:
            self.writes.source.notify()
        return n

    def write(self, data, proc):
        """As write(2): blocks; a signal that a handler takes ends it with a short count."""
        w = World.it
        n = self.write_some(data)
        while n < len(data):
            if not self.blocking:
                if n:
                    return n
                raise BlockingIOError(11, "again")
            seen = proc.interrupted

            def ready():
                return (
                    len(self.writes.data) < CAPACITY
                    or not self.writes.has_reader
                    or proc.interrupted != seen
                )

            w.block(ready, [self.writes.source, proc.child_ended])
            if proc.interrupted != seen and n:
                return n
            n += self.write_some(data[n:])
        return n


def pipe():
    buffer = Buffer()
    return End(reads=buffer), End(writes=buffer)


def stream_pair():
    a, b = Buffer(), Buffer()
    return End(a, b), End(b, a)


class Listener(File):
    def __init__(self, where):
        super().__init__()
        self.where = where  # path, or (host name, port)
        self.queue = []
        self.acceptor = None  # a zmq socket

    def readable(self):
        return bool(self.queue)

    def closed(self):
        w = World.it
        if w.listeners.get(self.where) is self:
            del w.listeners[self.where]
