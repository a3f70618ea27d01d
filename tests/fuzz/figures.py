"""What a session holds: memory, descriptors, threads, and segments of shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Process:
    """What one process holds."""

    nbytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Figures:
    """What a session holds: its leader, each of its ranks, and the files that they share."""

    leader: Process
    ranks: list[Process]
    segments: int

    def __str__(self) -> str:
        ranks = [_text(rank) for rank in self.ranks]
        return f"leader {_text(self.leader)}; ranks {', '.join(ranks)}; {self.segments} segments"


def of_process(process: psutil.Process) -> Process:
    """Returns what a process holds now."""
    with process.oneshot():
        return Process(process.memory_info().rss, process.num_fds(), process.num_threads())


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


def _text(process: Process) -> str:
    return f"{process.nbytes >> 20} MiB {process.descriptors} fd {process.threads} thr"
