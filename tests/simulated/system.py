"""The modules that simulated code imports in place of the system's, and the importer."""

from __future__ import annotations

import builtins
import collections
import errno
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os as real_os
import posixpath
import queue as real_queue
import random as real_random
import select as real_select
import selectors as real_selectors
import signal as real_signal
import socket as real_socket
import subprocess as real_subprocess
import sys
import threading as real_threading
import time as real_time
import types

from tests.simulated import zeromq
from tests.simulated.kernel import (
    File,
    Listener,
    Source,
    Thread,
    World,
    pipe,
    stream_pair,
)


def P():
    return World.it.thread.proc


class Module(types.ModuleType):
    """Names that are not replaced are the real module's."""

    def __init__(self, real, **own):
        super().__init__(real.__name__)
        self.__dict__["_real"] = real
        self.__dict__.update(own)

    def __getattr__(self, name):
        return getattr(self._real, name)


# time
def _monotonic():
    w = World.it
    w.yield_point()
    if w.now != w.looked_at:
        w.looked_at, w.looks = w.now, 0
    w.looks += 1
    if w.looks > 20000:
        import traceback

        place = [f for f in traceback.extract_stack() if "/allranks/" in f.filename][-4:]
        raise Spins(
            " <- ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(place))
        )
    return w.now


class Spins(BaseException):
    """The clock is read again and again, and nothing waits."""


def _sleep(seconds):
    w = World.it
    w.block(lambda: False, [], max(seconds, 1e-6))


time = Module(
    real_time,
    monotonic=_monotonic,
    time=lambda: World.it.now + 1.7e9,
    sleep=_sleep,
    perf_counter=lambda: World.it.now,
)


# os
def _read(fd, n):
    return P().fds[fd].read(n)


def _write(fd, data):
    if fd not in P().fds:
        raise OSError(9, "Bad file descriptor")
    return P().fds[fd].write(bytes(data), P())


def _pipe():
    r, w = pipe()
    return P().add(r), P().add(w)


def _dup(fd):
    return P().add(P().fds[fd])


def _dup2(a, b):
    file = P().fds[a]
    P().add(file, b)


def _kill(pid, number):
    target = World.it.procs.get(pid)
    if target is None or not target.alive or target.host is not P().host:
        raise ProcessLookupError(errno.ESRCH, "No such process")
    if target is P() and number == real_signal.SIGKILL:
        target.die(-9)
    target.signal(number)


def _waitpid(pid, flags):
    p = P()
    mine = [c for c in p.children if c.alive] or p.zombies
    z = p.reap(pid)
    if z is not None:
        return z.pid, z.code
    if not mine:
        raise ChildProcessError(errno.ECHILD, "No child processes")
    return 0, 0


def _waitid(kind, pid, flags):
    p = P()
    if p.zombies:
        return types.SimpleNamespace(si_pid=p.zombies[0].pid)
    if not [c for c in p.children if c.alive]:
        raise ChildProcessError(errno.ECHILD, "No child processes")
    return None


def _wait4(pid, flags):
    z = P().reap(pid)
    return z.pid, z.code, types.SimpleNamespace(ru_maxrss=0)


class _Environ(collections.UserDict):
    @property
    def data(self):
        return P().environ

    @data.setter
    def data(self, value):
        pass


def _mkdir(path, mode=0o777):
    files = P().host.files
    if path + "/" in files:
        raise FileExistsError(errno.EEXIST, "File exists", path)
    files[path + "/"] = b""


def _makedirs(path, mode=0o777, exist_ok=False):
    P().host.files[path + "/"] = b""


def _rmtree(path, ignore_errors=False, **_):
    files = P().host.files
    for name in [n for n in files if n.startswith(path + "/")]:
        del files[name]


def _rmdir(path):
    files = P().host.files
    if any(n.startswith(path + "/") and n != path + "/" for n in files):
        raise OSError(errno.ENOTEMPTY, "not empty")
    files.pop(path + "/", None)


def _stat(path, **_):
    files = P().host.files
    if path not in files and path + "/" not in files:
        raise FileNotFoundError(errno.ENOENT, "No such file", path)
    return types.SimpleNamespace(st_size=len(files.get(path, b"")), st_mtime=0.0, st_uid=0)


path = Module(
    posixpath,
    isdir=lambda p: p + "/" in P().host.files or p == "/home/me",
    exists=lambda p: p in P().host.files or p + "/" in P().host.files,
)


def _open_fd(path, flags, mode=0o777, **_):
    return P().add(File())


os = Module(
    real_os,
    read=_read,
    write=_write,
    pipe=_pipe,
    close=lambda fd: P().close(fd),
    dup=_dup,
    dup2=_dup2,
    kill=_kill,
    getpid=lambda: P().pid,
    getppid=lambda: P().parent.pid if P().parent is not None and P().parent.alive else 1,
    waitpid=_waitpid,
    waitid=_waitid,
    wait4=_wait4,
    environ=_Environ(),
    mkdir=_mkdir,
    makedirs=_makedirs,
    rmdir=_rmdir,
    stat=_stat,
    path=path,
    open=_open_fd,
    set_blocking=lambda fd, on: setattr(P().fds[fd], "blocking", on),
    getcwd=lambda: "/home/me",
    unlink=lambda p: P().host.files.pop(p, None),
    chdir=lambda p: None,
    listdir=lambda p: [],
    waitstatus_to_exitcode=lambda s: s,
    getloadavg=lambda: (0.0, 0.0, 0.0),
    cpu_count=lambda: 64,
    set_inheritable=lambda *a: None,
    register_at_fork=lambda **k: None,
    getuid=lambda: 0,
    devnull="/dev/null",
)
shutil = types.SimpleNamespace(rmtree=_rmtree)


def fake_open(name, mode="r", **_):
    files = P().host.files
    if "w" in mode or "a" in mode:

        class Kept(io.StringIO if "b" not in mode else io.BytesIO):
            def close(self):
                if not self.closed:
                    data = self.getvalue()
                    files[str(name)] = data.encode() if isinstance(data, str) else data
                super().close()

            def __exit__(self, *_):
                self.close()

        return Kept()
    if str(name) not in files:
        raise FileNotFoundError(errno.ENOENT, "No such file", name)
    data = files[str(name)]
    return io.BytesIO(data) if "b" in mode else io.StringIO(data.decode())


# subprocess
PROGRAMS = {}  # a function of argv that returns the main of the simulated program


class PipeFile:
    def __init__(self, proc, end):
        self.proc, self.end, self.fd = proc, end, proc.add(end)
        self.buffer = b""
        self.closed = False

    def fileno(self):
        return self.fd

    def write(self, data):
        if self.closed:
            raise ValueError("write to closed file")
        data = bytes(data)
        while data:  # as io.BufferedWriter does
            data = data[self.end.write(data, P()) :]
        return 0

    def flush(self):
        pass

    def read(self):
        parts = []
        while part := self.end.read(65536):
            parts.append(part)
        return b"".join(parts)

    def readline(self):
        while b"\n" not in self.buffer:
            part = self.end.read(65536)
            if not part:
                line, self.buffer = self.buffer, b""
                return line
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line + b"\n"

    def __iter__(self):
        while line := self.readline():
            yield line

    def close(self):
        if not self.closed:
            self.closed = True
            if self.fd in self.proc.fds and self.proc.fds[self.fd] is self.end:
                self.proc.close(self.fd)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Popen:
    def __init__(self, argv, stdin=None, stdout=None, stderr=None, env=None, pass_fds=(), **_):
        p = P()
        find = next(f for words, f in PROGRAMS.items() if words in " ".join(argv))
        fds = {}
        self.stdin = self.stdout = self.stderr = None
        if stdin == real_subprocess.PIPE:
            fds[0], mine = pipe()
            self.stdin = PipeFile(p, mine)
        else:
            fds[0] = File()
        if stdout == real_subprocess.PIPE:
            mine, fds[1] = pipe()
            self.stdout = PipeFile(p, mine)
        else:
            fds[1] = File()
        fds[2] = File()
        for fd in pass_fds:
            fds[fd] = p.fds[fd]
        main = find(list(argv))
        name = main.__name__
        self.proc = World.it.spawn(
            name, p.host, main, p, fds, env if env is not None else p.environ
        )
        self.pid = self.proc.pid
        self.returncode = None

    def poll(self):
        if not self.proc.alive and self.returncode is None:
            self.returncode = self.proc.code
            P().reap(self.pid)
        return self.returncode

    def wait(self, timeout=None):
        w = World.it
        if not w.block(lambda: not self.proc.alive, [self.proc.ended], timeout):
            raise real_subprocess.TimeoutExpired("x", timeout)
        return self.poll()

    def kill(self):
        self.proc.signal(real_signal.SIGKILL)

    terminate = kill


subprocess = Module(real_subprocess, Popen=Popen)


# threading
class Lock:
    def __init__(self):
        self.owner, self.count, self.source = None, 0, Source()

    def acquire(self, blocking=True, timeout=-1):
        w = World.it
        th = w.thread
        w.yield_point()
        if self.owner is th and self.reentrant:
            self.count += 1
            return True
        if self.owner is not None:
            if not blocking:
                return False
            if not w.block(
                lambda: self.owner is None,
                [self.source],
                None if timeout is None or timeout < 0 else timeout,
            ):
                return False
        self.owner, self.count = th, 1
        return True

    def release(self):
        self.count -= 1
        if not self.count:
            self.owner = None
            self.source.notify()

    def __enter__(self):
        self.acquire()
        return True

    def __exit__(self, *_):
        self.release()

    def locked(self):
        return self.owner is not None

    reentrant = False


class RLock(Lock):
    reentrant = True


class Condition(RLock):
    def __init__(self, lock=None):
        super().__init__()
        self.changed, self.generation = Source(), 0

    def notify_all(self):
        self.generation += 1
        self.changed.notify()

    notify = notify_all

    def wait_for(self, ready, timeout=None):
        w = World.it
        end = None if timeout is None else w.now + timeout
        while not ready():
            if end is not None and w.now >= end:
                return ready()
            self.wait(None if end is None else end - w.now)
        return True

    def wait(self, timeout=None):
        count, th = self.count, self.owner
        self.count, self.owner = 0, None
        self.source.notify()
        seen = self.generation
        found = World.it.block(lambda: self.generation != seen, [self.changed], timeout)
        World.it.block(lambda: self.owner is None, [self.source])
        self.count, self.owner = count, th
        return found


class Event:
    def __init__(self):
        self.flag, self.source = False, Source()

    def set(self):
        self.flag = True
        self.source.notify()

    def is_set(self):
        return self.flag

    def clear(self):
        self.flag = False

    def wait(self, timeout=None):
        return World.it.block(lambda: self.flag, [self.source], timeout)


class FThread:
    def __init__(self, target=None, args=(), kwargs=None, name="thread", daemon=None):
        self.target, self.args, self.name = target, args, name
        self.sim = None

    def start(self):
        self.sim = Thread(P(), lambda: self.target(*self.args), self.name)

    def join(self, timeout=None):
        World.it.block(lambda: self.sim.done, [self.sim.ended], timeout)

    def is_alive(self):
        return self.sim is not None and not self.sim.done

    @property
    def ident(self):
        return id(self.sim)


def _current():
    return World.it.thread


threading = Module(
    real_threading,
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Thread=FThread,
    current_thread=_current,
    main_thread=lambda: P().threads[0],
    get_ident=lambda: id(_current()),
    enumerate=lambda: [types.SimpleNamespace(ident=id(t)) for t in P().threads if not t.done],
)


class SimpleQueue:
    def __init__(self):
        self.items, self.source = collections.deque(), Source()

    def put(self, item):
        self.items.append(item)
        self.source.notify()
        World.it.yield_point()

    def get(self, block=True, timeout=None):
        if not self.items and not World.it.block(lambda: bool(self.items), [self.source], timeout):
            raise real_queue.Empty
        return self.items.popleft()

    def get_nowait(self):
        if not self.items:
            raise real_queue.Empty
        return self.items.popleft()

    def empty(self):
        return not self.items


queue = Module(real_queue, SimpleQueue=SimpleQueue)


# signal
def _signal(number, handler):
    p = P()
    before = p.handlers.get(
        number,
        real_signal.default_int_handler if number == real_signal.SIGINT else real_signal.SIG_DFL,
    )
    if handler in (real_signal.SIG_DFL, real_signal.default_int_handler):
        p.handlers.pop(number, None)
    else:
        p.handlers[number] = handler
    return before


def _set_wakeup_fd(fd, **_):
    P().wakeup = fd


def _raise_signal(number):
    p = P()
    handler = p.handlers.get(number)
    if callable(handler):
        handler(number, None)
    elif number == real_signal.SIGINT:
        raise KeyboardInterrupt


signal = Module(
    real_signal, signal=_signal, set_wakeup_fd=_set_wakeup_fd, raise_signal=_raise_signal
)


# socket
class Sock:
    """A socket of a process: unix stream, or a listening door."""

    def __init__(self, family=None, kind=None, proto=0, fileno=None):
        self.proc = P()
        self.fd = fileno
        self.end = self.proc.fds[fileno] if fileno is not None else None
        self.closed = False

    def _set(self, end):
        self.end, self.fd = end, self.proc.add(end)
        return self

    def bind(self, path):
        w = World.it
        where = (self.proc.host.name, path)
        self._set(Listener(where))
        w.listeners[where] = self.end

    def listen(self, n=0):
        pass

    def accept(self):
        if not self.end.queue:
            World.it.block(self.end.readable, [self.end.source])
        end = self.end.queue.pop(0)
        return Sock()._set(end), None

    def connect(self, path):
        w = World.it
        listener = w.listeners.get((self.proc.host.name, path))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        mine, theirs = stream_pair()
        theirs.peer = self.proc
        theirs.timeout = mine.timeout = None
        self._set(mine)
        if hasattr(self, "_timeout"):
            mine.timeout = self._timeout
        listener.queue.append(theirs)
        listener.source.notify()

    def fileno(self):
        return self.fd

    def settimeout(self, seconds):
        self._timeout = seconds
        if self.end is not None:
            self.end.timeout = seconds

    def setblocking(self, on):
        if self.end is not None:
            self.end.blocking = on

    def sendall(self, data):
        data = bytes(data)
        while data:
            data = data[self.end.write(data, P()) :]

    def send(self, data, flags=0):
        return self.end.write(bytes(data), P())

    def recv(self, n, flags=0):
        return self.end.read(n, peek=bool(flags & real_socket.MSG_PEEK))

    def makefile(self, mode="r"):
        f = PipeFile.__new__(PipeFile)
        f.proc, f.end, f.fd, f.buffer, f.closed = self.proc, self.end, self.fd, b"", False
        f.close = lambda: None
        f.read = lambda n=None: _read_exactly(self.end, n)
        return f

    def shutdown(self, how):
        self.end.closed()

    def close(self):
        if not self.closed and self.fd is not None:
            self.closed = True
            if self.fd in self.proc.fds and self.proc.fds[self.fd] is self.end:
                self.proc.close(self.fd)

    def detach(self):
        self.closed = True
        return self.fd

    def getsockname(self):
        where = self.end.where  # tcp://address:port
        address, _, port = where.removeprefix("tcp://").rpartition(":")
        return address, int(port)

    def getsockopt(self, *_):
        raise OSError

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _read_exactly(end, n):
    data = b""
    while len(data) < n:
        part = end.read(n - len(data))
        if not part:
            break
        data += part
    return data


def recv_fds(sock, nbytes, most, flags=0):
    data = sock.end.read(nbytes)
    files, sock.end.reads.fds = sock.end.reads.fds, []
    return data, [P().add(f) for f in files], 0, None


def send_fds(sock, parts, fds):
    sock.end.writes.fds = [P().fds[fd] for fd in fds]
    for f in sock.end.writes.fds:
        f.incref()
    sock.sendall(b"".join(parts))


def create_connection(address, timeout=None):
    w = World.it
    host, port = address
    name = w.host_of_address(host)
    here = P().host.name
    if w.cut(here, name):
        w.block(lambda: False, [], timeout)
        raise TimeoutError("timed out")
    w.block(lambda: False, [], 2 * w.delay(here, name))
    if f"tcp://{host}:{port}" not in w.listeners:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    return types.SimpleNamespace(close=lambda: None)


def create_server(address, family=None, **_):
    w = World.it
    host, port = address
    host = host or P().host.address
    port = port or next(P().host.ports)
    where = f"tcp://{host}:{port}"
    listener = w.listeners[where] = Listener(where)
    return Sock()._set(listener)


socket = Module(
    real_socket,
    socket=Sock,
    recv_fds=recv_fds,
    send_fds=send_fds,
    create_connection=create_connection,
    create_server=create_server,
    gethostname=lambda: P().host.name,
)


# selectors
class DefaultSelector:
    def __init__(self):
        self.map = {}

    @staticmethod
    def _fd(f):
        return f if isinstance(f, int) else f.fileno()

    def register(self, f, events, data=None):
        fd = self._fd(f)
        if fd in self.map:
            raise KeyError(f"{fd} is already registered")
        self.map[fd] = types.SimpleNamespace(fileobj=f, fd=fd, events=events, data=data)

    def unregister(self, f):
        fd = self._fd(f)
        if fd is None or fd not in self.map:
            raise KeyError(fd)
        return self.map.pop(fd)

    def modify(self, f, events, data=None):
        self.map[self._fd(f)].events = events

    def get_key(self, f):
        return self.map[self._fd(f)]

    def get_map(self):
        return self.map

    def select(self, timeout=None):
        w, p = World.it, P()
        keys = [(key, p.fds[fd]) for fd, key in self.map.items() if fd in p.fds]

        def ready():
            return [
                (key, 1)
                for key, file in keys
                if file.readable() or key.events & real_selectors.EVENT_WRITE
            ]

        sources = [
            f.reads.source if getattr(f, "reads", None) is not None else f.source for _, f in keys
        ]
        return w.block(ready, [*sources, p.child_ended], timeout) or []

    def close(self):
        self.map = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


selectors = Module(real_selectors, DefaultSelector=DefaultSelector)

secrets = types.SimpleNamespace(
    token_hex=lambda n=8: f"{World.it.rng.getrandbits(8 * n):0{2 * n}x}",
    randbits=lambda n: World.it.rng.getrandbits(n),
)
random = Module(real_random, sample=lambda s, k: World.it.rng.sample(s, k))


class _PsProcess:
    def __init__(self, pid=None):
        w = World.it
        self.p = P() if pid is None else w.procs.get(pid)
        if self.p is None or not self.p.alive:
            raise NoSuchProcess(pid)
        self.pid = self.p.pid

    def children(self, recursive=False):
        found, todo = [], [self.p]
        while todo:
            for c in todo.pop().children:
                if c.alive:
                    found.append(_PsProcess(c.pid))
                    todo.append(c)
        return found

    def cmdline(self):
        return [self.p.name]

    def environ(self):
        return self.p.environ


class NoSuchProcess(Exception):
    pass


psutil = types.SimpleNamespace(
    Process=_PsProcess,
    Error=NoSuchProcess,
    NoSuchProcess=NoSuchProcess,
    STATUS_STOPPED="stopped",
    pids=lambda: [p.pid for p in World.it.procs.values() if p.alive and p.host is P().host],
    pid_exists=lambda pid: pid in World.it.procs and World.it.procs[pid].alive,
)
fcntl = types.SimpleNamespace(flock=lambda *a: None, LOCK_SH=1, LOCK_EX=2, LOCK_NB=4)

zmq = zeromq


def _select(readers, writers, errors, timeout=None):
    p = P()
    files = [(fd, p.fds[fd]) for fd in readers]
    found = World.it.block(
        lambda: [fd for fd, file in files if file.readable()],
        [*(file.reads.source for _, file in files), p.child_ended],
        timeout,
    )
    return found or [], [], []


select = Module(real_select, select=_select)
FAKES = {
    "select": select,
    "time": time,
    "os": os,
    "shutil": shutil,
    "subprocess": subprocess,
    "threading": threading,
    "queue": queue,
    "signal": signal,
    "socket": socket,
    "selectors": selectors,
    "secrets": secrets,
    "random": random,
    "psutil": psutil,
    "fcntl": fcntl,
    "zmq": zeromq,
    "zmq.utils.monitor": zeromq,
}
SIMULATED = (
    "allranks.cluster",
    "allranks.engine.host",
    "allranks.engine.processes",
    "allranks.records",
    "allranks.countdown",
    "allranks.python_path",
)
STUBS = {}


def sim_import(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0:
        if name in FAKES:
            return FAKES[name]
        if name in STUBS and fromlist:
            return STUBS[name]
        if fromlist and any(f"{name}.{each}" in STUBS for each in fromlist):
            found = types.SimpleNamespace()
            real = builtins.__import__(name, globals, locals, (), 0)
            real = sys.modules[name]
            for each in fromlist:
                stub = STUBS.get(f"{name}.{each}")
                if stub is None:
                    builtins.__import__(name, globals, locals, (each,), 0)
                    stub = getattr(real, each)
                setattr(found, each, stub)
            return found
    found = builtins.__import__(name, globals, locals, fromlist, level)
    return found


class SimLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        own = dict(vars(builtins), __import__=sim_import, open=fake_open)
        module.__dict__["__builtins__"] = own
        super().exec_module(module)


class SimFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not name.startswith(SIMULATED):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = SimLoader(spec.loader.name, spec.loader.path)
        return spec


def install():
    sys.meta_path.insert(0, SimFinder())
