"""The modules that simulated code imports in place of the system's, and the importer.

The importer gives the modules of the control plane other builtins: their ``import`` finds the
modules of this file, and their ``open`` the files of a simulated host. No line of theirs changes.
"""

from __future__ import annotations

import asyncio
import builtins
import collections
import concurrent.futures as real_futures
import errno
import functools
import importlib.abc
import importlib.machinery
import os as real_os
import posixpath
import queue as real_queue
import random as real_random
import signal as real_signal
import subprocess as real_subprocess
import sys
import threading as real_threading
import time as real_time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.simulated import zeromq
from tests.simulated.kernel import File, Process, Source, Thread, World, pipe
from tests.simulated.sockets import (
    Module,
    PipeFile,
    open_file,
    select,
    selectors,
    socket,
    this_process,
)

#: The clock may be read so often at one moment; then the code that reads it waits for nothing.
_MOST_LOOKS = 20_000
_HOME = "/home/me"


class Spins(BaseException):
    """The clock is read again and again, and nothing waits: on a real machine a busy loop."""


# time
def _monotonic() -> float:
    world = World.it
    world.yield_point()
    if world.now != world.looked_at:
        world.looked_at, world.looks = world.now, 0
    world.looks += 1
    if world.looks > _MOST_LOOKS:
        places = [f for f in traceback.extract_stack() if "/allranks/" in f.filename][-4:]
        named = [
            f"{place.filename.rpartition('/')[2]}:{place.lineno}" for place in reversed(places)
        ]
        raise Spins(" < ".join(named))
    return world.now


def sleep(seconds: float) -> None:
    """Lets virtual time pass."""
    World.it.block(lambda: False, [], max(seconds, 1e-6))


time = Module(
    real_time,
    monotonic=_monotonic,
    time=lambda: World.it.now + 1.7e9,
    sleep=sleep,
    perf_counter=lambda: World.it.now,
)


# os
def read(fd: int, nbytes: int) -> bytes:
    file: Any = this_process().fds[fd]
    return bytes(file.read(nbytes))


def _write(fd: int, data: bytes) -> int:
    process = this_process()
    file: Any = process.fds.get(fd)
    if file is None:
        raise OSError(errno.EBADF, "Bad file descriptor")
    return int(file.write(bytes(data), process))


def _pipe() -> tuple[int, int]:
    reader, writer = pipe()
    return this_process().add(reader), this_process().add(writer)


def _kill(pid: int, number: int) -> None:
    process = World.it.procs.get(pid)
    if process is None or not process.alive or process.host is not this_process().host:
        raise ProcessLookupError(errno.ESRCH, "No such process")
    if number:
        process.signal(number)


def _waitpid(pid: int, flags: int) -> tuple[int, int]:
    me = this_process()
    has_children = any(child.alive for child in me.children) or bool(me.zombies)
    if (ended := me.reap(pid)) is not None:
        return ended.pid, ended.code
    if not has_children:
        raise ChildProcessError(errno.ECHILD, "No child processes")
    return 0, 0


def _waitid(kind: int, pid: int, flags: int) -> SimpleNamespace | None:
    me = this_process()
    ended = [zombie for zombie in me.zombies if kind == real_os.P_ALL or zombie.pid == pid]
    if ended:
        return SimpleNamespace(si_pid=ended[0].pid)
    if not any(c.alive and (kind == real_os.P_ALL or c.pid == pid) for c in me.children):
        raise ChildProcessError(errno.ECHILD, "No child processes")
    return None


def _wait4(pid: int, flags: int) -> tuple[int, int, SimpleNamespace]:
    ended = this_process().reap(pid)
    assert ended is not None
    return ended.pid, ended.code, SimpleNamespace(ru_maxrss=0)


class _Environ(collections.UserDict[str, str]):
    """The environment of the process that reads it."""

    @property
    def data(self) -> dict[str, str]:  # type: ignore[override]
        return this_process().environ

    @data.setter
    def data(self, value: object) -> None: ...


def _files() -> dict[str, bytes]:
    return this_process().host.files


def _mkdir(path: str, mode: int = 0o777) -> None:
    if f"{path}/" in _files():
        raise FileExistsError(errno.EEXIST, "File exists", path)
    _files()[f"{path}/"] = b""


def _makedirs(path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
    _files()[f"{path}/"] = b""


def _rmdir(path: str) -> None:
    if any(name.startswith(f"{path}/") and name != f"{path}/" for name in _files()):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")
    _files().pop(f"{path}/", None)


def _rmtree(path: str, ignore_errors: bool = False, **_: object) -> None:
    for name in [name for name in _files() if name.startswith(f"{path}/")]:
        del _files()[name]


def _stat(path: str, **_: object) -> SimpleNamespace:
    if not _exists(path):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
    return SimpleNamespace(st_size=len(_files().get(path, b"")), st_mtime=0.0, st_uid=0)


def _exists(path: str) -> bool:
    return path in _files() or f"{path}/" in _files()


def _parent() -> int:
    parent = this_process().parent
    return parent.pid if parent is not None and parent.alive else 1


def _no_session(pid: int) -> int:
    raise ProcessLookupError(errno.ESRCH, "No such process")


_path = Module(
    posixpath,
    isdir=lambda path: f"{path}/" in _files() or path == _HOME,
    exists=_exists,
    lexists=_exists,
)
os = Module(
    real_os,
    read=read,
    write=_write,
    pipe=_pipe,
    open=lambda path, flags, mode=0o777, **_: this_process().add(File()),
    close=lambda fd: this_process().close(fd),
    dup=lambda fd: this_process().add(this_process().fds[fd]),
    dup2=lambda a, b: this_process().add(this_process().fds[a], b),
    set_blocking=lambda fd, on: setattr(this_process().fds[fd], "blocking", on),
    set_inheritable=lambda *_: None,
    kill=_kill,
    getpid=lambda: this_process().pid,
    getppid=_parent,
    getsid=_no_session,
    getuid=lambda: 0,
    waitpid=_waitpid,
    waitid=_waitid,
    wait4=_wait4,
    waitstatus_to_exitcode=lambda status: status,
    environ=_Environ(),
    mkdir=_mkdir,
    makedirs=_makedirs,
    rmdir=_rmdir,
    unlink=lambda path: _files().pop(path, None),
    listdir=lambda path: [],
    stat=_stat,
    path=_path,
    getcwd=lambda: _HOME,
    chdir=lambda path: None,
    getloadavg=lambda: (0.0, 0.0, 0.0),
    cpu_count=lambda: 64,
    register_at_fork=lambda **_: None,
)
shutil = SimpleNamespace(rmtree=_rmtree)


# subprocess
Main = Callable[[], object]
#: Programs by words of their command lines: a function of the words returns the main function.
PROGRAMS: dict[str, Callable[[list[str]], Main]] = {}


class Popen:
    """Starts one of `PROGRAMS` on the host of the process that calls it."""

    def __init__(
        self,
        argv: Sequence[str],
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        **_: object,
    ) -> None:
        me, line = this_process(), " ".join(argv)
        program = next(made for words, made in PROGRAMS.items() if words in line)
        files: dict[int, File] = {number: File() for number in range(3)}
        self.stdin = self.stdout = self.stderr = None
        if stdin == real_subprocess.PIPE:
            files[0], mine = pipe()
            self.stdin = PipeFile(me, mine)
        if stdout == real_subprocess.PIPE:
            mine, files[1] = pipe()
            self.stdout = PipeFile(me, mine)
        files |= {fd: me.fds[fd] for fd in pass_fds}
        main = program(list(argv))
        environ = me.environ if env is None else env
        self._process = World.it.spawn(main.__name__, me.host, main, me, files, environ)
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if not self._process.alive and self.returncode is None:
            self.returncode = self._process.code
            this_process().reap(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        process = self._process
        if not World.it.block(lambda: not process.alive, [process.ended], timeout):
            raise real_subprocess.TimeoutExpired(process.name, timeout or 0.0)
        return self.poll()

    def kill(self) -> None:
        self._process.signal(real_signal.SIGKILL)

    terminate = kill


subprocess = Module(real_subprocess, Popen=Popen)


# threading
class Lock:
    """A lock that threads of the world wait for."""

    _reentrant = False

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._count, self._free = 0, Source()

    def acquire(self, blocking: bool = True, timeout: float | None = -1) -> bool:
        world = World.it
        world.yield_point()
        if self._owner is world.thread and self._reentrant:
            self._count += 1
            return True
        if self._owner is not None:
            limit = None if timeout is None or timeout < 0 else timeout
            if not blocking or not world.block(lambda: self._owner is None, [self._free], limit):
                return False
        self._owner, self._count = world.thread, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            self._free.notify()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A lock that its owner may take again."""

    _reentrant = True


class Condition(RLock):
    """A lock, and a wait for a change of what it guards."""

    def __init__(self, lock: object = None) -> None:
        super().__init__()
        self._changed, self._generation = Source(), 0

    def notify_all(self) -> None:
        self._generation += 1
        self._changed.notify()

    notify = notify_all

    def wait(self, timeout: float | None = None) -> bool:
        count, owner = self._count, self._owner
        self._count, self._owner = 0, None
        self._free.notify()
        seen = self._generation
        found = World.it.block(lambda: self._generation != seen, [self._changed], timeout)
        World.it.block(lambda: self._owner is None, [self._free])
        self._count, self._owner = count, owner
        return bool(found)

    def wait_for(self, ready: Callable[[], Any], timeout: float | None = None) -> Any:
        world = World.it
        end = None if timeout is None else world.now + timeout
        while not (found := ready()) and (end is None or world.now < end):
            self.wait(None if end is None else end - world.now)
        return found


class Event:
    """A flag that threads wait for."""

    def __init__(self) -> None:
        self._is_set, self._source = False, Source()

    def set(self) -> None:
        self._is_set = True
        self._source.notify()

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return bool(World.it.block(lambda: self._is_set, [self._source], timeout))


class SimulatedThread:
    """Stands for ``threading.Thread``."""

    def __init__(
        self,
        target: Callable[..., object] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str = "thread",
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self.name = target, tuple(args), name
        self._thread: Thread | None = None

    def start(self) -> None:
        assert self._target is not None
        target = self._target
        self._thread = Thread(this_process(), lambda: target(*self._args), self.name)

    def join(self, timeout: float | None = None) -> None:
        thread = self._thread
        assert thread is not None
        World.it.block(lambda: thread.done, [thread.ended], timeout)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.done

    @property
    def ident(self) -> int | None:
        return None if self._thread is None else id(self._thread)


threading = Module(
    real_threading,
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Thread=SimulatedThread,
    current_thread=lambda: World.it.thread,
    main_thread=lambda: this_process().threads[0],
    get_ident=lambda: id(World.it.thread),
    enumerate=lambda: [
        SimpleNamespace(ident=id(each)) for each in this_process().threads if not each.done
    ],
)


# concurrent.futures
class SimulatedFuture:
    """Stands for ``concurrent.futures.Future``."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._ended = call, Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._has_begun = self._is_cancelled = False

    def __class_getitem__(cls, item: object) -> type:
        return cls

    def run(self) -> None:
        """Makes the call, unless it was cancelled."""
        if self._is_cancelled:
            return
        self._has_begun = True
        try:
            self._result = self._call()
        except Exception as error:
            self._error = error
        self._ended.set()

    def cancel(self) -> bool:
        self._is_cancelled = not self._has_begun
        if self._is_cancelled:
            self._error = real_futures.CancelledError()
            self._ended.set()
        return self._is_cancelled

    def done(self) -> bool:
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result


class ThreadPoolExecutor:
    """An executor with one thread, which starts with the first call."""

    def __init__(self, most: int, name: str) -> None:
        assert most == 1
        self._calls: SimpleQueue = SimpleQueue()
        self._futures: list[SimulatedFuture] = []
        self._thread = SimulatedThread(self._serve, name=name)

    def submit(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> SimulatedFuture:
        future = SimulatedFuture(functools.partial(call, *arguments, **options))
        self._futures.append(future)
        self._calls.put(future)
        if not self._thread.ident:
            self._thread.start()
        return future

    def _serve(self) -> None:
        while (future := self._calls.get()) is not None:
            future.run()

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        for future in self._futures if cancel_futures else ():
            future.cancel()
        self._calls.put(None)
        if wait and self._thread.ident:
            self._thread.join()


futures = Module(real_futures, Future=SimulatedFuture, ThreadPoolExecutor=ThreadPoolExecutor)


# queue
class SimpleQueue:
    """A queue between threads of the world."""

    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._source = Source()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._source.notify()
        World.it.yield_point()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        waited = not self._items and block
        if waited:
            World.it.block(lambda: bool(self._items), [self._source], timeout)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise real_queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


queue = Module(real_queue, SimpleQueue=SimpleQueue)


# asyncio: its own loop, whose selector and clock are the world's.
class EventLoop(asyncio.BaseEventLoop):
    """An event loop of a thread of the world."""

    def __init__(self) -> None:
        super().__init__()
        self._source, self._is_woken = Source(), False
        self._selector = self

    def time(self) -> float:
        return World.it.now

    def select(self, timeout: float | None) -> list[Any]:
        World.it.block(lambda: self._is_woken, [self._source], timeout)
        self._is_woken = False
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None:
        self._is_woken = True
        self._source.notify()


# signal
_INT = real_signal.SIGINT
_DEFAULTS = real_signal.SIG_DFL, real_signal.default_int_handler


def _signal(number: int, handler: Any) -> Any:
    handlers = this_process().handlers
    default = real_signal.default_int_handler if number == _INT else real_signal.SIG_DFL
    before = handlers.get(number, default)
    if handler in _DEFAULTS:
        handlers.pop(number, None)
    else:
        handlers[number] = handler
    return before


def _set_wakeup_fd(fd: int, **_: object) -> int:
    before, this_process().wakeup = this_process().wakeup, fd
    return before


def _raise_signal(number: int) -> None:
    handler = this_process().handlers.get(number)
    if callable(handler):
        handler(number, None)
    elif number == _INT:
        raise KeyboardInterrupt


signal = Module(
    real_signal, signal=_signal, set_wakeup_fd=_set_wakeup_fd, raise_signal=_raise_signal
)

# Random numbers are those of the world.
secrets = SimpleNamespace(
    token_hex=lambda nbytes=8: f"{World.it.rng.getrandbits(8 * nbytes):0{2 * nbytes}x}",
    randbits=lambda count: World.it.rng.getrandbits(count),
)
random = Module(real_random, sample=lambda source, count: World.it.rng.sample(source, count))


# psutil
class NoSuchProcess(Exception):
    """Stands for ``psutil.NoSuchProcess``."""


class _KnownProcess:
    def __init__(self, pid: int | None = None) -> None:
        found = this_process() if pid is None else World.it.procs.get(pid)
        if found is None or not found.alive:
            raise NoSuchProcess(pid)
        self._process: Process = found
        self.pid = found.pid

    def children(self, recursive: bool = False) -> list[_KnownProcess]:
        return [_KnownProcess(each.pid) for each in _descendants(self._process)]

    def cmdline(self) -> list[str]:
        return [self._process.name]

    def environ(self) -> dict[str, str]:
        return self._process.environ


def _descendants(process: Process) -> Iterator[Process]:
    for child in process.children:
        if child.alive:
            yield child
            yield from _descendants(child)


def _pid_exists(pid: int) -> bool:
    return pid in World.it.procs and World.it.procs[pid].alive


def _wait_procs(
    found: Sequence[_KnownProcess], timeout: float
) -> tuple[list[_KnownProcess], list[_KnownProcess]]:
    waited = [each._process for each in found]
    World.it.block(
        lambda: not any(one.alive for one in waited), [one.ended for one in waited], timeout
    )
    return (
        [each for each in found if not each._process.alive],
        [each for each in found if each._process.alive],
    )


psutil = SimpleNamespace(
    wait_procs=_wait_procs,
    Process=_KnownProcess,
    Error=NoSuchProcess,
    NoSuchProcess=NoSuchProcess,
    STATUS_STOPPED="stopped",
    pids=lambda: [p.pid for p in World.it.procs.values() if p.alive and p.host is _here()],
    pid_exists=_pid_exists,
)


def _here() -> Any:
    return this_process().host


fcntl = SimpleNamespace(flock=lambda *_: None, LOCK_SH=1, LOCK_EX=2, LOCK_NB=4)

#: What simulated code imports in place of a module.
IN_PLACE: dict[str, Any] = {
    "concurrent.futures": futures,
    "fcntl": fcntl,
    "os": os,
    "psutil": psutil,
    "queue": queue,
    "random": random,
    "secrets": secrets,
    "select": select,
    "selectors": selectors,
    "shutil": shutil,
    "signal": signal,
    "socket": socket,
    "subprocess": subprocess,
    "threading": threading,
    "time": time,
    "zmq": zeromq,
    "zmq.utils.monitor": zeromq,
}
#: Modules of allranks of which simulated code gets a model; filled by `tests.simulated.production`.
MODELS: dict[str, Any] = {}
#: The production code that is simulated.
_SIMULATED = (
    "allranks.cluster",
    "allranks.countdown",
    "allranks.engine.host",
    "allranks.engine.processes",
    "allranks.features.attach",
    "allranks.features.ensemble.runner",
    "allranks.features.ensemble.slots",
    "allranks.features.hosts",
    "allranks.python_path",
    "allranks.records",
)


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    if level == 0:
        if name in IN_PLACE:
            return IN_PLACE[name]
        if name in MODELS and fromlist:
            return MODELS[name]
        modelled = [each for each in fromlist or () if f"{name}.{each}" in MODELS]
        if modelled:
            rest = [each for each in fromlist or () if each not in modelled]
            builtins.__import__(name, globals, locals, rest, 0)
            real = sys.modules[name]
            found = {each: getattr(real, each) for each in rest}
            return SimpleNamespace(**found, **{e: MODELS[f"{name}.{e}"] for e in modelled})
    return builtins.__import__(name, globals, locals, fromlist or (), level)


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        own = dict(vars(builtins), __import__=_import, open=open_file)
        module.__dict__["__builtins__"] = own
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith(_SIMULATED):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Has all modules of `_SIMULATED` that are imported from now on import the world's modules."""
    early = [name for name in sys.modules if name.startswith(_SIMULATED)]
    if early:
        raise RuntimeError(f"expected no simulated module yet, found {', '.join(early)}")
    sys.meta_path.insert(0, _Finder())
