"""At which address and ports the hosts reach this machine."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress

from allranks.errors import StartFailed, UsageError
from allranks.records.config import source_address

#: Names the address of this machine at which the hosts reach it.
ADDRESS = "ALLRANKS_ADDRESS"
#: The ports on which the hosts may reach this machine, as ``50000-50100``.
PORTS = "ALLRANKS_PORTS"
ANY_PORTS = (49152, 65535)
LOOPBACK = "127.0.0.1"
_PORT = 9
"""Nothing is sent to it: the system chooses a route for an address and a port."""


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
        return source_address(host, _PORT, socket.AF_INET)
    except OSError:
        with suppress(OSError):
            return source_address(host, _PORT, socket.AF_INET6)
        raise


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
