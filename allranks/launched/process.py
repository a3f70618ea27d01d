"""A process's place among those that were started with it, as its launcher says."""

from __future__ import annotations

from collections.abc import Mapping

from allranks.launched.mpich import MPICH
from allranks.launched.open_mpi import OPEN_MPI
from allranks.launched.slurm import SLURM

LAUNCHERS = (OPEN_MPI, MPICH, SLURM)
"""The nearest to a process first: Slurm may have started another's mpiexec."""


def rank(environment: Mapping[str, str]) -> int:
    """The rank that a launcher gave this process; 0 where none has started it."""
    for launcher in LAUNCHERS:
        for name in launcher.ranks:
            if environment.get(name, "").isdecimal():
                return int(environment[name])
    return 0


def size(environment: Mapping[str, str]) -> tuple[int, str]:
    """How many processes were started, and which variable says so; 1 and "" where none does."""
    for launcher in LAUNCHERS:
        if environment.get(launcher.size, "").isdecimal():
            return int(environment[launcher.size]), launcher.size
    return 1, ""


def local_place(environment: Mapping[str, str], rank: int, size: int) -> tuple[int, int]:
    """Returns a process's number among those of its host, and how many these are.

    As the launcher says, where there are several hosts. On a single one it is the rank: Open MPI
    counts local ranks in another order where there are more of them than cores.
    """
    for launcher in LAUNCHERS:
        local, count = launcher.local_rank, launcher.local_size
        if environment.get(local, "").isdecimal() and environment.get(count, "").isdecimal():
            if int(environment[count]) < size:
                return int(environment[local]), int(environment[count])
            break
    return rank, size
