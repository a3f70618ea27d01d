"""A notebook whose kernel runs on one of several hosts, and is driven from outside."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from tests.faults.notebook import Notebook, name_of
from tests.hosts.hosts import Hosts
from tests.kernel import spec_of

HOME = "h0"


class NotebookOnAHost(Notebook):
    """A notebook on ``h0``.

    Args:
        hosts: the hosts.
        cwd: where it runs; all hosts see that.
        env: additions to the environment; a value of None removes the name.
    """

    def __init__(self, hosts: Hosts, cwd: Path, env: dict[str, str | None] | None = None) -> None:
        self._hosts = hosts
        super().__init__(cwd, {"TMPDIR": None, "ALLRANKS_LEASE": "10"} | (env or {}))

    def _start(self) -> None:
        spec = spec_of(self.python)
        spec.argv = self._hosts.command(HOME, spec.argv, self.cwd)
        self._manager._kernel_spec = spec
        # No port of the host is to be had from outside.
        self._manager.transport = "ipc"
        self._manager.ip = str(self.cwd / "kernel-ipc")
        super()._start()
        self._find_kernel()

    def restart(self, timeout: float = 60) -> None:
        """Restarts as the front end's button does: a shutdown request, then force."""
        super().restart(timeout)
        self._find_kernel()

    def _find_kernel(self) -> None:
        self.pid = next(p.pid for p in self._inside() if "ipykernel_launcher" in p.cmdline())

    def _inside(self) -> list[psutil.Process]:
        return [process for process in super().children() if name_of(process) != "nsenter"]

    def children(self) -> list[psutil.Process]:
        """Returns the processes on the notebook's own host that came from its kernel."""
        return [process for process in self._inside() if process.pid != self.pid]

    def interrupt(self) -> None:
        """Interrupts the kernel."""
        os.kill(self.pid, signal.SIGINT)

    def check_nothing_left(self) -> None:
        """Raises unless every process is gone, and every file but the logs, on every host."""
        left = self._hosts.left()
        assert left == [], left
        super().check_nothing_left()
