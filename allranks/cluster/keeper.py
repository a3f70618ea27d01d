"""A small process that tidies up once it is told to, or once the notebook's process is gone."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from weakref import WeakSet

_kept: WeakSet[Keeper] = WeakSet()


class Keeper:
    """A command that waits.

    Args:
        script: what a shell runs in the end.
        words: its arguments.
    """

    def __init__(self, script: str, *words: str) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f"read -r _; {script}", "sh", *words],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # An interrupt of the kernel goes to its whole process group: not to this one.
            start_new_session=True,
        )
        _kept.add(self)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def close(self, seconds: float) -> None:
        """Has the command run now, and waits for it so long; from any thread, more than once."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it has ended, or was told already
            # A process that was forked without Python may hold the pipe too: it would not end.
            self._process.stdin.write(b"\n")
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def _let_go() -> None:
    """In a process that was forked: the pipe is to end with the notebook's own."""
    for keeper in list(_kept):
        assert keeper._process.stdin is not None
        keeper._process.stdin.close()


os.register_at_fork(after_in_child=_let_go)
