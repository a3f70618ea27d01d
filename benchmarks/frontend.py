"""A minimal front end that measures the time of a cell, and the bytes that it receives.

Both sides run in kernels of the same kind, with the same MPI wheel and the same settings of it.
allranks sets these for Open MPI itself; ipyparallel needs them as root, or with more ranks than
cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from allranks.cluster.launchers.mpiexec import mpi_environment
from tests.kernel import Cell, Kernel

ROOT = Path(__file__).resolve().parent.parent
_CELL_SECONDS = 300.0
_STARTED_SECONDS = 300.0  # the default of 60 s is too short for many engines on few busy cores

LOAD = "%load_ext allranks"
START = "%distributed start -n {n}"
STOP = "%distributed stop"
START_PEER = """
import ipyparallel
_cluster = ipyparallel.Cluster(engines="mpi", n={n}, engine_timeout={seconds})
_client = _cluster.start_and_connect_sync(activate=True)
"""
# One by one, because `stop_cluster` takes seconds longer.
STOP_PEER = """
_client.close()
_cluster.stop_engines_sync()
_cluster.stop_controller_sync()
"""


class Failed(Exception):
    """A cell failed that must succeed."""


class FrontEnd(Kernel):
    """A kernel whose iopub messages are counted when they arrive."""

    nbytes = 0

    def do(self, source: str, timeout: float = _CELL_SECONDS) -> Cell:
        """Runs a cell that must succeed; its ``seconds`` last until the kernel is idle."""
        started = time.perf_counter()
        cell = self.run(source, timeout)
        cell.seconds = time.perf_counter() - started
        if cell.status != "ok":
            raise Failed(f"{source}\n{cell.text}")
        return cell

    def rss(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def _start(self) -> None:
        super()._start()
        channel, session = self._client.iopub_channel, self._client.session

        def get_msg(timeout: float | None = None) -> dict[str, Any]:
            frames = channel.socket.recv_multipart()
            self.nbytes += sum(map(len, frames))
            message: dict[str, Any] = session.deserialize(session.feed_identities(frames)[1])
            return message

        channel.get_msg = get_msg


def environment() -> dict[str, str]:
    return {
        **mpi_environment(),
        # ipyparallel finds mpiexec on PATH, where a system's MPI may come first.
        "PATH": os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }


@contextmanager
def front_end(more: dict[str, str] | None = None) -> Iterator[FrontEnd]:
    """Yields a front end with a new kernel; all processes of that kernel end with it.

    ``more`` replaces settings of :func:`environment`.
    """
    env: dict[str, str | None] = {**environment(), **(more or {})}
    with tempfile.TemporaryDirectory() as folder, FrontEnd(Path(folder), env) as end:
        try:
            yield end
        finally:
            # Stopped first, because killed ranks leave shared memory.
            end.shutdown()
            with suppress(TimeoutError):
                end.wait_for_no_children()


def start_peer(end: FrontEnd, n: int) -> None:
    end.do(START_PEER.format(n=n, seconds=_STARTED_SECONDS), _STARTED_SECONDS)
    end.do("%%px\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank")
    cell = end.do("print(sorted(_client[:]['rank']))")
    if cell.stdout.strip() != str(list(range(n))):
        raise Failed(f"expected ranks 0 to {n - 1}, found {cell.stdout.strip()}")
