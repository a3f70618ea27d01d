"""A notebook's front end, reduced to what is measured: the cell's time, and every byte it is sent.

Both sides run in kernels of the same make, with the same MPI wheel and the same settings for it:
those that allranks gives Open MPI by itself, ipyparallel needs to run as root or with more ranks
than cores.
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

from allranks.cluster.launchers.local import LocalLauncher
from tests.kernel import Cell, Kernel

ROOT = Path(__file__).resolve().parent.parent
_CELL_SECONDS = 300.0
_STARTED_SECONDS = 300.0  # its 60 s are not enough for many engines on a few busy cores

LOAD = "%load_ext allranks"
START = "%distributed start -n {n}"
STOP = "%distributed stop"
START_PEER = """
import ipyparallel
_cluster = ipyparallel.Cluster(engines="mpi", n={n}, engine_timeout={seconds})
_client = _cluster.start_and_connect_sync(activate=True)
"""
#: One by one: ``stop_cluster`` takes seconds longer to do the same.
STOP_PEER = """
_client.close()
_cluster.stop_engines_sync()
_cluster.stop_controller_sync()
"""


class Failed(Exception):
    """A cell that must succeed did not."""


class FrontEnd(Kernel):
    """A kernel whose iopub messages are counted as they come off the wire."""

    nbytes = 0

    def do(self, source: str, timeout: float = _CELL_SECONDS) -> Cell:
        """Runs a cell that must succeed; its ``seconds`` last until the kernel is idle.

        Raises:
            Failed: it did not.
        """
        started = time.perf_counter()
        cell = self.run(source, timeout)
        cell.seconds = time.perf_counter() - started
        if cell.status != "ok":
            raise Failed(f"{source}\n{cell.text}")
        return cell

    def rss(self) -> int:
        """Returns the kernel's resident memory in bytes."""
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
    """Returns the settings that both sides get."""
    return {
        **LocalLauncher().environment(),
        # ipyparallel looks mpiexec up on PATH, where a system's may stand first.
        "PATH": os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }


@contextmanager
def front_end(more: dict[str, str] | None = None) -> Iterator[FrontEnd]:
    """A front end of a fresh kernel; whatever came from that kernel ends with it.

    Args:
        more: settings of the kernel's environment that replace those of :func:`environment`.
    """
    env: dict[str, str | None] = {**environment(), **(more or {})}
    with tempfile.TemporaryDirectory() as folder, FrontEnd(Path(folder), env) as end:
        try:
            yield end
        finally:
            # Asked first: ranks that are killed leave their shared memory behind.
            end.shutdown()
            with suppress(TimeoutError):
                end.wait_for_no_children()


def start_peer(end: FrontEnd, n: int) -> None:
    """Starts ipyparallel's engines and tells each of them its rank."""
    end.do(START_PEER.format(n=n, seconds=_STARTED_SECONDS), _STARTED_SECONDS)
    end.do("%%px\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank")
    cell = end.do("print(sorted(_client[:]['rank']))")
    if cell.stdout.strip() != str(list(range(n))):
        raise Failed(f"expected ranks 0 to {n - 1}, found {cell.stdout.strip()}")
