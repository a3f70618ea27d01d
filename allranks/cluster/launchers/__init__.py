"""Runs in the notebook's kernel: what starts processes as ranks, one environment a file."""

from __future__ import annotations

from typing import Protocol

from allranks.errors import UsageError


class Launcher(Protocol):
    """What can start ``n`` processes that are ranks of one MPI world."""

    name: str

    def command(self, size: int) -> list[str]:
        """Returns the argument vector up to the program that every rank runs."""

    def environment(self) -> dict[str, str]:
        """Returns what the launcher and the ranks need in their environment."""

    def describe(self) -> str:
        """Returns where the ranks run, in a few words, for the start line."""


def named(name: str) -> Launcher:
    """Returns the launcher of that name.

    Raises:
        UsageError: there is none.
    """
    from allranks.cluster.launchers.local import LocalLauncher

    if name == "local":
        return LocalLauncher()
    raise UsageError(f"expected a launcher, found {name!r}. There is: --on local")
