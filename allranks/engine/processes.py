"""Keeping and ending processes, the platform's way."""

from __future__ import annotations

import ctypes
import glob
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36
_SLEEP_SECONDS = 2.5e-4
_SHARED_MEMORY = "/dev/shm/"


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
    cores = _cores()
    seconds = _SLEEP_SECONDS * ranks / cores if ranks > cores else 0.0
    _prctl(_PR_SET_TIMERSLACK, int(seconds * 1e9))
    try:
        yield
    finally:
        _prctl(_PR_SET_TIMERSLACK, 0)  # the default


def share_cores(ranks: int) -> None:
    """Limits numeric libraries to one rank's share of this host's cores."""
    # They read these variables as they are loaded: before a fork, if they are preloaded.
    share = str(max(1, _cores() // ranks))
    os.environ.setdefault("OMP_NUM_THREADS", share)
    # TensorFlow's own threads: without these every rank makes one a core, twice.
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", share)
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")


def _cores() -> int:
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return found or 1


def close_all_but(kept: set[int]) -> None:
    highest = max([int(name) for name in os.listdir("/dev/fd") if name.isdigit()], default=255)
    for descriptor in range(highest + 1):
        if descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:
                pass


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    if pid > 0:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


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
        if process.pid not in spared and not (spare_trackers and _is_tracker(process)):
            kill(process.pid)
    return bool(found)


def shared_memory_left() -> float:
    # In bytes.
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return math.inf  # there is no such place, so no files go there
    return found.f_bavail * found.f_frsize


def _is_tracker(process: psutil.Process) -> bool:
    return _has_word(process, "multiprocessing.resource_tracker")


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


def shared_segments(pid: int) -> set[str]:
    found = set()
    try:
        with open(f"/proc/{pid}/maps") as maps:
            for line in maps:
                path = line.rstrip("\n").partition(_SHARED_MEMORY)[2]
                if path and not path.endswith(" (deleted)"):
                    found.add(_SHARED_MEMORY + path)
    except OSError:
        pass  # the process is gone, or the platform has no /proc
    return found


def segments_since(began: float) -> set[str]:
    # Files of this user only.
    found = set()
    for path in glob.glob(f"{_SHARED_MEMORY}*"):
        try:
            about = os.stat(path)
        except OSError:
            continue  # it has just been removed
        if about.st_uid == os.geteuid() and about.st_ctime >= began - 1:
            found.add(path)
    return found


def unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


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
        os.makedirs(os.path.dirname(log), mode=0o700, exist_ok=True)  # it may have been removed
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
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
