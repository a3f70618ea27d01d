"""Keeping and ending processes, the platform's way, and how children have ended."""

from __future__ import annotations

import _io
import atexit
import ctypes
import gc
import glob
import io
import math
import os
import select
import signal
import stat
import sys
import threading
import time
import traceback
import weakref
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil

from allranks.records import limits

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36
_SLEEP_SECONDS = 2.5e-4
_SHARED_MEMORY = "/dev/shm/"
_GROUPS = Path("/sys/fs/cgroup")
#: Of both versions of cgroups.
_LIMITS = "memory.max", "memory.limit_in_bytes"
_COUNTS = "memory.events", "memory.oom_control"
_ANY_NUMBER = 1 << 60
_LOOK_SECONDS, _RECENT_SECONDS = 0.4, 10.0
_AGAIN_SECONDS = 1.0
_KIB = 1024
_TRACKER = "multiprocessing.resource_tracker"
_COMPRESSED = {"bz2", "gzip", "lzma", "zipfile"}


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def adopt_orphans() -> None:
    # Descendants whose own parent dies become children of this process (Linux).
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Has this process killed when its parent dies (Linux); ends it if that has happened."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def sleeping_longer(ranks: int) -> Iterator[None]:
    """Within, this thread's short sleeps last longer where ranks outnumber the cores (Linux).

    While it starts, Open MPI polls every 0.1 ms for the other ranks. A hundred that do so leave no
    time for the launcher, for which they all wait.
    """
    available = cores()
    seconds = _SLEEP_SECONDS * ranks / available if ranks > available else 0.0
    _prctl(_PR_SET_TIMERSLACK, int(seconds * 1e9))
    try:
        yield
    finally:
        _prctl(_PR_SET_TIMERSLACK, 0)  # the default


def cores() -> int:
    """Returns how many processors this process may use."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return found or 1


def close_all_but(kept: set[int]) -> None:
    highest = max([int(name) for name in os.listdir("/dev/fd") if name.isdigit()], default=255)
    for descriptor in range(highest + 1):
        if descriptor not in kept:
            with suppress(OSError):
                os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of it: a signal during a write that waits for room ends that write early."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    if pid > 0:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def reap_all() -> bool:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def descendants() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


def kill_children(spare_trackers: bool = False, spare_agents: bool = False) -> bool:
    """Kills every descendant of this process; returns whether there were any.

    ``spare_trackers`` leaves those of multiprocessing, which remove what a process had in shared
    memory, once it and all that it has spawned are gone: only they have the names.
    ``spare_agents`` ends host agents of clusters that ranks have started with SIGTERM instead: each
    ends its own processes, and then removes their files.
    """
    found = psutil.Process().children(recursive=True)
    spared = set[int]()
    for process in found if spare_agents else ():
        if _is_host_agent(process):
            kill(process.pid, signal.SIGTERM)
            with suppress(psutil.Error):  # it has ended
                spared |= {process.pid, *(p.pid for p in process.children(recursive=True))}
    for process in found:
        if process.pid not in spared and not (spare_trackers and _has_word(process, _TRACKER)):
            kill(process.pid)
    return bool(found)


def end_descendants(alone_seconds: float, agents_seconds: float) -> None:
    """Ends all descendants of this process, which adopts orphans, and waits for the last one.

    They have ``alone_seconds`` to end by themselves. From then on host agents have the time
    ``agents_seconds``, and trackers `limits.TRACKER_SECONDS`: see `kill_children`.
    """
    with _waiting_for_children() as wait:
        began = time.monotonic()
        while reap_all() and (left := began + alone_seconds - time.monotonic()) > 0:
            wait(left)
        began = time.monotonic()
        while reap_all():
            waited = time.monotonic() - began
            kill_children(
                spare_trackers=waited < limits.TRACKER_SECONDS, spare_agents=waited < agents_seconds
            )
            # A process that was started meanwhile is a child once its parent, just killed, ends.
            later = (s - waited for s in (limits.TRACKER_SECONDS, agents_seconds) if s > waited)
            # And again: a look at all processes may have missed one, whose end no signal reports.
            wait(min([*later, _AGAIN_SECONDS]))


@contextmanager
def _waiting_for_children() -> Iterator[Callable[[float], None]]:
    """Within, the function waits until a child has ended, or for a time in seconds.

    In the main thread only.
    """
    wake, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # It is inherited from the process that has started this one whether signals are blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    before = signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)

    def wait(seconds: float) -> None:
        if select.select([wake], [], [], seconds)[0]:
            os.read(wake, 4096)

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(before)
        os.close(wake)
        os.close(wake_writer)


def shared_memory_left() -> float:
    # In bytes.
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return math.inf  # there is no such place, so no files go there
    return found.f_bavail * found.f_frsize


def _is_host_agent(process: psutil.Process) -> bool:
    # Its ranks have the same command line, but only the agent leads its session.
    try:
        return os.getsid(process.pid) == process.pid and _has_word(process, sys.orig_argv[-1])
    except ProcessLookupError:
        return False


def _has_word(process: psutil.Process, text: str) -> bool:
    try:
        return any(text in word for word in process.cmdline())
    except psutil.Error:
        return False  # it is gone


def shared_segments(pid: int, began: float = 0.0) -> set[str]:
    """Returns the files in shared memory that a process maps, of those made after ``began``."""
    found = set()
    # The process may be gone, or the platform has no /proc.
    with suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition(_SHARED_MEMORY)[2]
            if path and not path.endswith(" (deleted)"):
                found.add(_SHARED_MEMORY + path)
    return {path for path in found if not began or _is_made_since(path, began)}


def segments_since(began: float) -> set[str]:
    return {path for path in glob.glob(f"{_SHARED_MEMORY}*") if _is_made_since(path, began)}


def _is_made_since(path: str, began: float) -> bool:
    # A file of this user only.
    with suppress(OSError):  # it has just been removed
        about = os.stat(path)
        own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
        return own and about.st_ctime >= began - 1
    return False


def first_line(descriptor: int) -> tuple[bytes, bytes] | None:
    """Returns the first line, and input that came with it; None if the input ends first."""
    said = b""
    while b"\n" not in said:
        more = os.read(descriptor, 65536)
        if not more:
            return None
        said += more
    # Input of another host, which was faster, may follow the configuration at once.
    line, _, rest = said.partition(b"\n")
    return line, rest


def unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def write_to(log: str) -> None:
    """Makes a file the standard output and standard error of this process."""
    os.makedirs(os.path.dirname(log), mode=0o700, exist_ok=True)  # it may have been removed
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def fork(
    live: Callable[[], None],
    environment: dict[str, str],
    log: str,
    work_dir: str,
    keep: Sequence[int] = (),
) -> int:
    """Returns the id of a new process that runs ``live`` and dies with this one.

    The process has only these environment variables, writes to ``log``, and keeps the descriptors 0
    to 2 and ``keep``. Its exit code is 0 if ``live`` returns.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        # The handlers and the pipe for signals are those of the parent.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        write_to(log)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        close_all_but({0, 1, 2, *keep})
        os.chdir(work_dir)
        live()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Exit functions are those of the parent.
            os._exit(code)


def forget_exit_functions() -> None:
    """Has `end_process` call only exit functions that are registered from now on."""
    atexit._clear()
    finalize: Any = weakref.finalize
    for one in list(finalize._registry):
        one.atexit = False
    finalize._registered_with_atexit = False  # else it would not register itself again


def end_process() -> NoReturn:
    """Ends this process as Python ends a program: with its exit functions, and with what its files
    have not written yet. After `EXIT_SECONDS` it ends without the rest, and some time before
    without the rest of the functions.
    """
    for seconds, end in (
        (limits.FUNCTIONS_SECONDS, _leave),
        (limits.EXIT_SECONDS, partial(os._exit, 0)),
    ):
        late = threading.Timer(seconds, end)
        late.daemon = True
        late.start()
    try:
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    _leave()


def _leave() -> NoReturn:
    _flush_files()
    os._exit(0)


def _flush_files() -> None:
    # Not those of the parent: its objects are frozen, and not in this list.
    kinds = _io._IOBase, zipfile.ZipFile
    opened = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    # A file of text writes to a compressed one or to an archive, and that to one of bytes.
    for file in sorted(opened, key=_layer):
        with suppress(Exception):
            # Only its end makes a compressed file complete.
            file.close() if type(file).__module__ in _COMPRESSED else file.flush()


def _layer(file: Any) -> int:
    if isinstance(file, zipfile.ZipFile):
        return 2
    return 0 if isinstance(file, io.TextIOBase) else 3 if type(file).__module__ == "_io" else 1


def has_ended(child: int) -> bool:
    """Whether a child has ended; it is not reaped."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


@dataclass(frozen=True)
class EndedChild:
    """How a child ended; ``memory`` is a text about memory if it was killed."""

    pid: int
    code: int
    memory: str


@dataclass(frozen=True)
class _Counts:
    """How many processes the kernel has killed for lack of memory; NaN if it is unknown."""

    at: float
    system: float
    #: In the cgroup of this process.
    group: float


class ExitReports:
    """Reports the ends of this process's children, and counts the kernel's out-of-memory kills."""

    def __init__(self) -> None:
        self._group = _group_of(os.getpid())
        self._counts = deque([self._now()])

    def look(self) -> None:
        # Twice a second. A large process ends some time after its kill was counted.
        if time.monotonic() < self._counts[-1].at + _LOOK_SECONDS:
            return
        self._counts.append(self._now())
        while len(self._counts) > 1 and self._counts[1].at < time.monotonic() - _RECENT_SECONDS:
            self._counts.popleft()

    def _now(self) -> _Counts:
        return _Counts(time.monotonic(), _of_the_system(), _killings(self._group))

    def next(self) -> EndedChild | None:
        """Returns the report of the next child that has ended; None if there is none now."""
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            group = _group_of(found.si_pid)  # as long as it has not been reaped
            pid, status, used = os.wait4(found.si_pid, os.WNOHANG)
        except ChildProcessError:
            return None
        code = os.waitstatus_to_exitcode(status)
        memory = self._memory(group, used.ru_maxrss * _KIB) if code == -signal.SIGKILL else ""
        return EndedChild(pid, code, memory)

    def _memory(self, group: Path | None, nbytes: int) -> str:
        """Returns a text about out-of-memory kills, and about the memory that a rank had."""
        had = f"its peak memory was {_amount(nbytes)}"
        before, now = self._counts[0], self._now()
        of_system = now.system > before.system
        if group == self._group:
            of_group = now.group > before.group
        else:  # a cgroup of its own, whose first count is unknown
            of_group = of_system and _killings(group) > 0
        if not (of_system or of_group):
            unknown = math.isnan(now.system) and math.isnan(now.group)
            return had if unknown else f"the kernel reports no out-of-memory kill; {had}"
        self._counts = deque([now])  # this kill has been reported
        if group is not None and of_group:
            limit = f"the limit of its cgroup {group.name} is {_amount(_limit(group))}"
            return f"out of memory: {limit}; {had}"
        seconds = now.at - before.at
        return f"out of memory: the kernel killed a process here within {seconds:.0f} s; {had}"


def _of_the_system() -> float:
    return _count([Path("/proc/vmstat")])


def _killings(group: Path | None) -> float:
    return math.nan if group is None else _count([group / name for name in _COUNTS])


def _count(files: Sequence[Path]) -> float:
    for path in files:
        with suppress(OSError):
            for name, *values in filter(None, map(str.split, path.read_text().splitlines())):
                if name == "oom_kill":
                    return int(values[0])
    return math.nan


def _group_of(pid: int) -> Path | None:
    """Returns the folder of a process's cgroup; None if none counts memory."""
    # With cgroups of version 1, that of an ended process is unknown: mostly it is the same as this
    # one's.
    for name in (str(pid), "self"):
        with suppress(OSError):
            for line in Path(f"/proc/{name}/cgroup").read_text().splitlines():
                number, kinds, path = line.split(":", 2)
                group = _GROUPS / ("memory" if kinds else "") / path.strip("/")
                if (number == "0" or "memory" in kinds.split(",")) and _limit(group):
                    return group
    return None


def _limit(group: Path) -> int:
    for name in _LIMITS:
        with suppress(OSError):
            said = (group / name).read_text().strip()
            return int(said) if said.isdigit() and int(said) < _ANY_NUMBER else 0
    return 0


def _amount(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
