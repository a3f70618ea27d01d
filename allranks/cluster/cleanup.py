"""A process that removes what a kernel leaves if it is killed."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from weakref import WeakSet

_waiting: WeakSet[CleanupProcess] = WeakSet()


class CleanupProcess:
    """A shell that waits for `close` or the end of this process, then runs ``script``."""

    def __init__(self, script: str, *words: str) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f"read -r _; {script}", "sh", *words],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # A session of its own: an interrupt goes to the kernel's whole process group.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        #: Until one thread takes it: another one that wrote at the same time could write to a
        #: closed descriptor, or to another file that has its number by then.
        self._pipes = [self._process.stdin]
        _waiting.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self, seconds: float) -> None:
        """Runs the command now, and waits for its end; from any thread, more than once."""
        # Another thread has taken the pipe, or a fork has closed it, or the shell has ended.
        with suppress(IndexError, ValueError, BrokenPipeError), self._pipes.pop() as pipe:
            # A line ends the wait even if a process forked without Python holds the pipe open.
            pipe.write(b"\n")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def _close_pipes() -> None:
    """Runs in a forked process: only the notebook's own end may keep the pipe open."""
    for keeper in list(_waiting):
        assert keeper._process.stdin is not None
        keeper._process.stdin.close()


# A program that is started does not inherit the pipe; a forked process does.
os.register_at_fork(after_in_child=_close_pipes)
