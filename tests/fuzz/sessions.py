"""A session to play steps in: ranks, and the kernel or the process that leads them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.fuzz.grammar import Fault
from tests.fuzz.ranks import SETUP, Witness

SHARED = Path("/dev/shm")

HANG_SECONDS = 60.0
"""A cell that has not ended by then is called a hang. It is no promise of speed: it only has to be
far above what any cell here takes on a busy machine."""
ENVIRONMENT = {"ALLRANKS_LATE_SECONDS": "0.5"}
"""Some ranks here are late for longer than that, and are named."""

Signals = Sequence[tuple[float, int, int]]


@dataclass
class Ended:
    """How a cell ended, as its reader sees it.

    Attributes:
        how: ``ok``, or the error's name.
        reports: rank, exception and whether it only waited, of each rank that did not finish.
        bundles: rich displays, each with the label above it.
        nbytes: how much was sent to the front end, where there is one.
    """

    how: str
    message: str = ""
    text: str = ""
    reports: list[tuple[int, str, bool]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    bundles: list[tuple[str, str]] = field(default_factory=list)
    nbytes: int = 0


class Session:
    """Ranks that steps are played on, of a notebook or of this process. Each kind defines:

    ``cell``: runs a cell and returns how it ended. ``push``, ``pull``, ``status``: return how they
    ended, with one value a rank. ``restart(size)`` and ``stop``: of the ranks. ``revive``: what a
    user does before the next cell where ranks were lost. ``leader``: the process that leads the
    ranks. ``close``: ends everything; a `Fault` where something is left. ``abandon``: ends
    everything after a fault, whatever it takes.

    Args:
        size: how many ranks.
        folder: where the session may leave files, until it is closed.

    Attributes:
        steps: how many probes the ranks have run since their variables were set.
        starts: how often ranks were started.
        heals: whether ranks that die are replaced.
    """

    kind: str
    heals = False

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.witness = Witness(folder / "witness")
        self.steps = 0
        self.starts = 0
        self.pids: dict[int, int] = {}

    def set_up(self) -> None:
        """Gives the ranks their variables: they are fresh, or have forgotten them."""
        ended = self.cell(SETUP.format(folder=str(self.witness.folder)))
        if ended.how != "ok":
            raise Fault("set up", f"fresh ranks: {ended.how}: {ended.message}\n{ended.text}")
        pids = dict(enumerate(self.cell("os.getpid()", wants_values=True).values))
        if pids != self.pids:
            self.starts += 1
        self.pids, self.steps = pids, 0

    def figures(self) -> str:
        """Returns what the session holds now."""
        leader = self.leader()
        ranks = ", ".join(_figures(psutil.Process(pid)) for pid in self.pids.values())
        shared = len(segments(leader.children(recursive=True)))
        return f"leader {_figures(leader)}; ranks {ranks}; {shared} segments"


def _figures(process: psutil.Process) -> str:
    with process.oneshot():
        nbytes, descriptors = process.memory_info().rss, process.num_fds()
        return f"{nbytes >> 20} MiB {descriptors} fd {process.num_threads()} thr"


def more(held: tuple[int, int], before: tuple[int, int]) -> bool:
    """Whether there are more descriptors, or more threads, than before.

    Fewer is no leak: pyzmq ends the thread of its large messages when the last one is gone.
    """
    return any(now > then for now, then in zip(held, before, strict=True))


def segments(processes: Iterable[psutil.Process]) -> set[str]:
    """Returns the files in shared memory that processes have mapped."""
    found: set[str] = set()
    for process in processes:
        with suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found |= set(re.findall(rf"{SHARED}/(\S+)$", maps, re.MULTILINE))
    return found
