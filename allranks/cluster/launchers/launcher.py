"""What a launcher is: here mpiexec; elsewhere what runs one command once on every host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from allranks.records.config import Invitation

Tell = Callable[[str, str], None]
"""Called, in any thread, with a host and why the command has ended there."""


@dataclass(frozen=True)
class Host:
    """A host, as its launcher calls it, and how many ranks it is to have.

    ``login`` is the host for ssh, where that is to be another user's: ``me@h1``.
    """

    name: str
    ranks: int
    login: str = ""


class _Named(Protocol):
    """What can start processes that are ranks of one MPI world."""

    name: str

    def environment(self) -> dict[str, str]:
        """Returns what the launcher and the ranks need in their environment."""

    def describe(self) -> str:
        """Returns where the ranks run, in a few words, for the start line."""


class OnThisMachine(_Named, Protocol):
    """One that starts them here."""

    def command(self, size: int) -> list[str]:
        """Returns the argument vector up to the program that every rank runs."""


class Job(Protocol):
    """One command on every host, from when it was asked for until it is gone everywhere."""

    def hosts(self) -> Sequence[Host]:
        """Returns where it runs; nothing as long as it waits for hosts.

        Raises:
            StartFailed: it will not run.
        """

    def waits(self) -> str:
        """Returns what it waits for, in a line; empty where that is nothing."""

    def all_came(self) -> None:
        """Takes back the invitation, which is needed no longer."""

    def why_ended(self) -> str:
        """Returns what ended it, where its launcher knows: ``reached its time limit``."""

    def close(self) -> None:
        """Ends it on every host; what has ended by itself is left."""


@runtime_checkable
class OnSeveralHosts(_Named, Protocol):
    """One that starts them on other machines."""

    def size(self, n: int | None) -> int:
        """Returns how many ranks there will be.

        Raises:
            UsageError: ``n`` was asked for, and the hosts have room for another number.
        """

    def command(self, hosts: Sequence[Host]) -> list[str]:
        """Returns the argument vector up to the program that every rank runs."""

    def address(self) -> str:
        """Returns the address of this machine at which the hosts reach it.

        Raises:
            StartFailed: there is none.
        """

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> Job:
        """Has the relay run once on every host, with this invitation.

        Raises:
            StartFailed: that cannot be.
            MissingDependency: the launcher's program is not installed.
        """


Launcher = OnThisMachine | OnSeveralHosts
