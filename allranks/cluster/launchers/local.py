"""Ranks on this machine: ``--on local``, the default."""

from __future__ import annotations

import os

from allranks import port_filter
from allranks.cluster.launchers.launcher import Launcher
from allranks.cluster.launchers.mpiexec import (
    LASTING_SETTINGS,
    beside_python,
    is_open_mpi,
    mpi_environment,
    mpiexec,
)


class LocalLauncher(Launcher):
    """Starts ranks on this machine."""

    name = "local"
    about = "ranks on this machine"

    def heals(self, size: int) -> bool:
        """Whether new processes can replace ranks that die."""
        # The wheel's mpiexec supports it; others may have been built without.
        known = mpiexec() == beside_python() and is_open_mpi()
        # A user's own settings stay, and may keep new processes from connecting to the others.
        own = LASTING_SETTINGS.keys() & os.environ.keys()
        return size > 1 and known and not own and port_filter.is_supported()

    def command(self, size: int) -> list[str]:
        """Returns mpiexec and its options, up to the program that every rank runs."""
        return [mpiexec(), "-n", str(size)]

    def environment(self) -> dict[str, str]:
        return mpi_environment(alone=True)

    def describe(self) -> str:
        return "this machine"
