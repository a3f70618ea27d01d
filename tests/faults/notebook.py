"""A notebook that uses allranks, and what it must have left behind when it is closed: logs."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil

from tests.kernel import Cell, Kernel, KernelDied, wait_until

GONE_SECONDS = 60
#: What four ranks show of ``kept``, which is 10 * rank.
KEPT = "rank 0 → 0\nrank 1 → 10\nrank 2 → 20\nrank 3 → 30\n"
_SHARED_MEMORY = Path("/dev/shm")
#: Run in the notebook: what it has not heard of by then, the next cell would hear of in its middle.
HEARS_OF_A_DEATH = """
def hears(rank):
    # A client that an earlier test has made would have the rank replaced after this cell.
    from allranks.features.ipyparallel import client_requests
    client_requests._clients.clear()
    session = get_ipython().magics_manager.registry["DistributedMagics"].session
    ranks = session.running.cells.connection
    while not ranks.roster.ends and rank not in ranks.roster.dead:
        ranks.step(0.05)
hears({})
del hears
"""


def name_of(process: psutil.Process) -> str:
    """Returns the name of a process, or an empty text where it has ended meanwhile."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def named(processes: list[psutil.Process], *names: str) -> psutil.Process:
    """Returns the first process that has one of these names; others may end meanwhile."""
    for process in processes:
        if name_of(process) in names:
            return process
    raise LookupError(f"no process is named {' or '.join(names)}")


def below(folder: Path) -> list[Path]:
    """Returns all that is in a folder and its folders, of which some may be removed meanwhile."""
    found = os.walk(folder)
    return [Path(place, name) for place, folders, files in found for name in (*folders, *files)]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Within, a process stands still, unless it is killed there."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


class Notebook(Kernel):
    """A kernel that has loaded allranks, with a temporary folder of its own.

    Args:
        cwd: where it runs.
        env: additions to the environment; a value of None removes the name.
        python: the interpreter whose kernel it is.
    """

    def __init__(
        self, cwd: Path, env: dict[str, str | None] | None = None, python: str = sys.executable
    ) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="faults-"))
        self._segments: set[str] = set()
        super().__init__(cwd, {"TMPDIR": str(self.temporary)} | (env or {}), python)

    def __enter__(self) -> Self:
        super().__enter__()
        loaded = self.run("%load_ext allranks")
        assert loaded.status == "ok", loaded.text
        return self

    def on_ranks(self, source: str, options: str = "", timeout: float = 60) -> Cell:
        """Runs ``source`` on the ranks and returns the cell once it has ended."""
        return self.start_on_ranks(source, options).wait(timeout)

    def start_on_ranks(self, source: str, options: str = "") -> Cell:
        """Sends ``source`` to the ranks and returns the cell while it runs."""
        return self.start(f"%%distributed {options}".rstrip() + f"\n{source}")

    def settle(self) -> None:
        for cell in [cell for cell in self._cells.values() if not cell.done and self.is_alive]:
            self.interrupt()
            with suppress(TimeoutError, KernelDied):
                cell.wait()
        if not self.is_alive or any(not cell.done for cell in self._cells.values()):
            self.restart()
            self.run("%load_ext allranks")

    def reopen(self) -> None:
        """Starts another kernel where the one before has ended."""
        super().stop()
        self.__enter__()

    def pids(self) -> dict[int, int]:
        return {
            int(rank): int(pid)
            for rank, pid in re.findall(
                r"rank (\d+)  pid (\d+)", self.run("%distributed status").text
            )
        }

    def kill_rank(self, rank: int) -> None:
        psutil.Process(self.pids()[rank]).kill()
        heard = self.run(HEARS_OF_A_DEATH.format(rank))
        assert heard.status == "ok", heard.text

    def logs(self) -> dict[str, Path]:
        return {path.name: path for path in sorted(self.cwd.glob(".state/allranks/*/*.log"))}

    def note_files(self) -> set[str]:
        for process in self.children():
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self._segments |= set(re.findall(rf"{_SHARED_MEMORY}/(\S+)$", maps, re.MULTILINE))
        return self._segments

    def kept_folders(self) -> list[Path]:
        found = []
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(OSError):  # it was closed just now
                found.append(link.readlink())
        return [folder for folder in found if folder.name.startswith("allranks-kept-")]

    def check_nothing_left(self) -> None:
        """Raises unless every process is soon gone, and every file but the logs."""
        self.wait_for_no_children(GONE_SECONDS)
        wait_until(lambda: not self.files_left(), lambda: f"the end of {self.files_left()}")

    def files_left(self) -> list[str]:
        shared = [name for name in self._segments if (_SHARED_MEMORY / name).exists()]
        temporary = list(map(str, below(self.temporary)))
        # The kernel's own, which its front end removes, and the folders that the tests gave it.
        own = (".", "kernel-")
        mine = [path.name for path in self.cwd.iterdir() if not path.name.startswith(own)]
        state = [path.name for path in below(self.cwd / ".state") if path.is_file()]
        state += [path.name for path in self.cwd.glob(".ipython/*/security/*.json")]
        # Beside the logs stands what cells have logged.
        stays = (".log", ".json.gz")
        return shared + temporary + mine + [name for name in state if not name.endswith(stays)]

    def stop(self) -> None:
        """Ends the kernel; its cluster is given the time to tidy up before it is killed."""
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)
        with suppress(TimeoutError):
            self.wait_for_no_children(GONE_SECONDS)
        super().stop()
        shutil.rmtree(self.temporary, ignore_errors=True)
