"""The configuration of a host's ranks, limits of both sides, and ``ALLRANKS_…`` variables."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from typing import Any

from allranks.errors import UsageError
from allranks.launched import RankVariables
from allranks.records import limits
from allranks.records.frozen import frozen

#: Instead of devices: all GPUs of the host, which it looks for itself.
EVERY_GPU = "all"

#: With more ranks, the controller of clients starts on request: it needs six descriptors for each
#: one.
CLIENTS_RANKS = 128

#: Sets the seconds of the lease, after which the host ends its ranks.
LEASE = "ALLRANKS_LEASE"

#: Where the notebook listens that starts ranks on its own machine, formatted with their session
#: folder.
FIRST_COMMANDS = "ipc://{}/commands-1"
FIRST_EVENTS = "ipc://{}/events-1"
COMMANDS_AT_HOME = "ipc://{}/commands"
#: Where a later notebook listens, formatted with the session folder of the ranks.
EVENTS_AT_HOME = "ipc://{}/events"
#: How the folders for MPI's files in shared memory begin.
MPI_FILES = "allranks-mpi-"
#: The socket in that folder at which notebooks ask for the ranks.
NOTEBOOKS_DOOR = "notebook"


@frozen
class Invitation:
    """Where the notebook listens for other hosts, and its CURVE public key, which is a secret.

    ``host`` is the launcher's name of the host that gets it; empty if the host finds its name in a
    variable of the launcher. ``lease_seconds`` is how long the host waits for the notebook if the
    network is interrupted.
    """

    commands_url: str
    events_url: str
    wire_key: str
    host: str = ""
    lease_seconds: float = limits.LEASE_SECONDS

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Invitation:
        return cls(**json.loads(text))


@frozen
class HostAgentConfig:
    """How to bring up the ranks of one host: one JSON line on the host agent's standard input.

    ``launch`` is the launcher's argument vector up to the program it starts in every rank.
    ``devices`` holds one ``CUDA_VISIBLE_DEVICES`` value for each local rank, or is empty; or it is
    ``EVERY_GPU`` alone.
    ``commands_url`` and ``events_url`` say where the notebook listens, or with several hosts this
    host's relay: at sockets in ``session_dir``.

    Where ranks are on several hosts ``local_size`` of the ``size`` ranks are on this one. The
    first host is the ``head``: it runs the launcher, and the controller of clients, which listens
    on ``interface``.

    If it ``can_replace`` ranks, the launcher lets the other ones live when one dies. On several
    hosts it starts ``spares`` more processes on each host, which take the places of dead ranks;
    ``seats`` has the rank of each of the launcher's processes, -1 for a spare. ``relocation`` is a
    name for the start after a host was lost.
    ``kept_dirs`` are the folders of what ranks keep, which outlive them and not the notebook.
    ``rank_variables`` are the launcher's own, if its processes do not find their rank in those of
    mpiexec or srun. ``mpi_secret`` is a part of the name of the folder for MPI's files.
    """

    size: int
    launch: tuple[str, ...]
    environment: dict[str, str]
    session_dir: str
    log_dir: str
    work_dir: str
    devices: tuple[str, ...]
    commands_url: str
    events_url: str
    preload: tuple[str, ...] = ()
    local_size: int = 0
    head: bool = True
    interface: str = ""
    can_replace: bool = False
    spares: int = 0
    seats: tuple[int, ...] = ()
    relocation: str = ""
    kept_dirs: tuple[str, ...] = ()
    rank_variables: tuple[RankVariables, ...] = ()
    mpi_secret: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))

    @property
    def ranks_here(self) -> int:
        """How many of the ranks are on this host."""
        return self.local_size or self.size

    @property
    def shared_dir(self) -> str:
        """The folder in shared memory for MPI's files, the same on all hosts.

        Not named like the session's folder, which all accounts see before this one is made.
        """
        return f"/dev/shm/{MPI_FILES}{self.mpi_secret}"

    @property
    def several_hosts(self) -> bool:
        """Whether ranks are on other hosts as well."""
        return bool(self.interface)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HostAgentConfig:
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> HostAgentConfig:
        """Read back what :func:`dataclasses.asdict` and JSON have made of a configuration."""
        for key in ("launch", "devices", "preload", "seats", "kept_dirs"):
            fields[key] = tuple(fields[key])
        fields["rank_variables"] = tuple(
            RankVariables(tuple(ranks), *others) for ranks, *others in fields["rank_variables"]
        )
        return cls(**fields)


def family_of(address: str) -> socket.AddressFamily:
    """Returns the kind of socket for an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def source_address(
    host: str, port: int, family: socket.AddressFamily = socket.AddressFamily.AF_UNSPEC
) -> str:
    """Returns this machine's address on the route to a host; raises OSError if there is none."""
    with socket.socket(family or family_of(host), socket.SOCK_DGRAM) as route:
        # For UDP, this only chooses the route: no packet is sent.
        route.connect((host, port))
        return str(route.getsockname()[0])


def tcp_url(address: str) -> str:
    """Returns ZeroMQ's name of an address, as ``tcp://10.1.0.12`` or ``tcp://[fd00::12]``."""
    return f"tcp://[{address}]" if ":" in address else f"tcp://{address}"


def version() -> str:
    """Returns the version of allranks that runs here, as ``0.1.0``."""
    # An import of allranks itself would be circular. It is loaded by now.
    return str(sys.modules["allranks"].__version__)


#: The options with which the kernel "allranks" starts its ranks: those of ``%distributed start``.
START_WITH = "ALLRANKS_START"


def variable_choice(name: str, choices: Sequence[str], default: str) -> str:
    """Returns the value of a variable, one of some words; the default where it is not set."""
    value = os.environ.get(name, default)
    if value not in choices:
        raise _wrong(name, f"{', '.join(choices[:-1])} or {choices[-1]}", default)
    return value


def variable_seconds(name: str, default: float) -> float:
    """Returns the seconds of a variable, a number above 0; the default where it is not set."""
    try:
        found = float(os.environ.get(name, default))
    except ValueError:
        found = math.nan
    if not found > 0:
        raise _wrong(name, "seconds above 0", f"{default:g}")
    return found


def lease_seconds() -> float:
    """Returns how long hosts and notebook wait for each other if the network is interrupted."""
    found = variable_seconds(LEASE, limits.LEASE_SECONDS)
    shortest, longest = limits.SHORTEST_LEASE_SECONDS, limits.LONGEST_LEASE_SECONDS
    if not shortest <= found <= longest:
        raise _wrong(LEASE, f"{shortest:g} to {longest:g} seconds", f"{limits.LEASE_SECONDS:g}")
    return found


#: How many spare processes each of several hosts has.
SPARES = "ALLRANKS_SPARES"


def spares_on_each(hosts: Sequence[int]) -> int:
    """Returns how many spare processes each host has; ``hosts`` has the number of its ranks for
    each. By default at least two, and enough for the ranks of one other host.
    """
    default = max(2, -(-max(hosts) // max(1, len(hosts) - 1)))
    found = os.environ.get(SPARES, str(default))
    if not found.isdecimal():
        raise _wrong(SPARES, "a number of processes on each host, or 0", str(default))
    return int(found)


#: The largest number of ranks of a notebook: an administrator's limit for each student.
MAX_RANKS = "ALLRANKS_MAX_RANKS"


def max_ranks() -> int | None:
    """Returns the number that ``ALLRANKS_MAX_RANKS`` allows; None where it is not set."""
    text = os.environ.get(MAX_RANKS)
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise _wrong(MAX_RANKS, "a number of ranks, 1 or more", "no limit of its own")
    return int(text)


_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def size_text(nbytes: float) -> str:
    """Returns a size, as ``4 MB``, in powers of ten."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * size:  # never as 1e+03 of the smaller unit
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def variable_nbytes(name: str, default: int, least: int) -> int:
    """Returns the bytes of a variable like ``500 MB``; the default where it is not set."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*(|kB|MB|GB|TB)\s*", os.environ.get(name, str(default)))
    try:
        size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    except ValueError:
        size = 0
    if size < least:
        wanted = f"a size of {least:,} bytes or more, such as 500 MB"
        raise _wrong(name, wanted, f"{default:,} bytes")
    return size


def _wrong(name: str, wanted: str, default: str) -> UsageError:
    return UsageError(
        f"expected {name} to be {wanted}, found {os.environ[name]!r}. Unset it for {default}."
    )
