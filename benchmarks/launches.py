"""Several MPIs in one measurement: each has its ranks under its own mpiexec, and all stay alive.

One process gives the turns. The ranks of all other launches sleep meanwhile: each reads from its
socket, and uses no core. A turn begins with a call that is not counted, as the ranks have just been
woken, and other processes have used the caches. Every side has its turns in this way, also two
sides of one launch. Each rank keeps to one core, as Intel's MPI does by itself: ranks that are
woken at once would else begin a turn on the same core.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

ADDRESS, NAME = "ALLRANKS_BENCHMARK_ADDRESS", "ALLRANKS_BENCHMARK_LAUNCH"
ROOT = Path(__file__).resolve().parents[1]
OTHERS = (".venv-mpich", ".venv-impi")
"""The environments beside .venv that have another MPI, as the Makefile makes them."""
Calls = Mapping[str, Callable[[], object]]


def pythons() -> list[str]:
    """Returns the Python of each environment with another MPI that is installed."""
    folders = [ROOT / name / "bin" for name in OTHERS]
    return [str(bin / "python") for bin in folders if (bin / "mpiexec").exists()]


def take_turns(comm: Any, calls: Callable[[int], Calls]) -> None:
    """Makes calls on this rank as `Launch.turn` asks for them, until `side_by_side` ends.

    ``calls`` returns the sides of this launch for a number of bytes.
    """
    from mpi4py import MPI

    with Client(os.environ[ADDRESS]) as connection:
        connection.send((os.environ[NAME], comm.Get_rank(), MPI.Get_library_version()))
        known, sides = -1, calls(4)
        if (core := connection.recv()) >= 0:
            os.sched_setaffinity(0, {core})
        while request := connection.recv():
            side, nbytes, each = request
            if nbytes != known:
                known, sides = nbytes, calls(nbytes)
            sides[side]()
            comm.Barrier()
            began = time.perf_counter()
            for _ in range(each):
                sides[side]()
            connection.send((time.perf_counter() - began) / each)


class Launch:
    """The ranks of one mpiexec."""

    def __init__(self, output: Future[Any]) -> None:
        self.output = output
        self.ranks: list[Connection[Any, Any]] = []
        self.version = ""

    def turn(self, side: str, nbytes: int, each: int) -> float:
        """Returns the seconds per call of ``each`` calls in a row, on the slowest rank."""
        for rank in self.ranks:
            rank.send((side, nbytes, each))
        seconds: list[float] = [rank.recv() for rank in self.ranks]
        return max(seconds)


@contextmanager
def side_by_side(
    size: int, programs: Mapping[str, tuple[str, ...]], **settings: str
) -> Iterator[dict[str, Launch]]:
    """Starts a launch of ``size`` ranks for each name, with these Pythons and arguments.

    Afterwards the ranks get no more turns and continue; each `Launch.output` is their output.
    """
    from tests.mpi.launch import mpiexec

    with (
        tempfile.TemporaryDirectory() as folder,
        Listener(f"{folder}/turns") as listener,
        ThreadPoolExecutor() as launchers,
    ):
        address = str(listener.address)

        def run(name: str, python: str, *arguments: str) -> str:
            try:
                own = {ADDRESS: address, NAME: name}
                done = mpiexec(size, *arguments, python=python, timeout=1800, **own, **settings)
            finally:
                # Ends the wait below if ranks have not come this far.
                with Client(address) as connection:
                    connection.send((name, -1, ""))
            if done.returncode:
                raise RuntimeError(f"{size} ranks of {name} have failed:\n{done.stdout}")
            return done.stdout

        found = {
            name: Launch(launchers.submit(run, name, *words)) for name, words in programs.items()
        }
        ended = set()
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [-1]
        try:
            while any(len(launch.ranks) < size for launch in found.values()):
                connection = listener.accept()
                name, rank, version = connection.recv()
                if rank < 0:
                    ended.add(name)
                    raise RuntimeError(found[name].output.result())
                found[name].ranks.append(connection)
                found[name].version = version
                connection.send(cores[rank % len(cores)])
            yield found
        finally:
            for launch in found.values():
                for connection in launch.ranks:
                    connection.send(None)
            while len(ended) < len(found):
                connection = listener.accept()
                name, rank, _ = connection.recv()
                if rank < 0:
                    ended.add(name)
                else:
                    connection.send(-1)
                    connection.send(None)


def on_peer() -> None:
    """The program of a launch that only compares: it needs mpi4py and numpy."""
    import numpy as np
    from mpi4py import MPI

    def calls(nbytes: int) -> Calls:
        mine = np.ones(nbytes // 4, np.float32)
        out = np.empty_like(mine)
        return {"mpi4py": lambda: MPI.COMM_WORLD.Allreduce(mine, out)}

    take_turns(MPI.COMM_WORLD, calls)


if __name__ == "__main__":
    on_peer()
