"""How the first ranks of several hosts come to be connected: once, as the world is made."""

from __future__ import annotations

import fcntl
import hmac
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from allranks.collectives.mpi.courier import Courier, Link
from allranks.errors import ClusterError

if TYPE_CHECKING:
    from mpi4py import MPI

    from allranks.collectives.calls.standing import Standing

_SIOCGIFADDR = 0x8915
_TRY_SECONDS, _ALL_SECONDS = 2.0, 30.0
_TOKEN_BYTES = 16


def introduce(own: Standing, base: MPI.Intracomm) -> None:
    """Has the first rank of each host carry what its host's ranks tell from now on.

    Whoever listens does so until all have come, and no longer; who connects has to know a number
    that was drawn for that, and told by MPI.

    Collective over ``base``.
    """
    rank, firsts = own.rank, sorted(set(own.shares))
    listening = None
    told: tuple[list[str], int, bytes] | None = None
    if rank == 0:
        listening = socket.create_server(("", 0), backlog=len(firsts))
        told = addresses(), listening.getsockname()[1], os.urandom(_TOKEN_BYTES)
    where, port, token = base.bcast(told)
    near = [other for other, first in enumerate(own.shares) if first == own.shares[rank]]
    links, problem = [], ""
    try:
        if listening is not None:
            links = _accept(listening, token, firsts[1:], own.shares)
        elif rank in firsts:
            behind = [other for other in range(own.size) if other not in near]
            links = [Link(_connect(where, port, token, rank), behind)]
    except OSError as error:
        problem = f"rank {rank}, on {socket.gethostname()}: {error}"
    finally:
        if listening is not None:
            listening.close()
    problems = [each for each in base.allgather(problem) if each]
    if problems:
        raise ClusterError(
            "expected that the first rank of each host can connect to rank 0's host, by one of its "
            f"addresses {', '.join(where)}; {problems[0]}. Let hosts connect to each other's ports."
        )
    own.peers.host_names = tuple(base.allgather(socket.gethostname()))
    if rank in firsts:
        courier = Courier(own.board, rank, near, links)
        own.tell = courier.wake
        courier.start()


def _accept(
    listening: socket.socket, token: bytes, firsts: Sequence[int], shares: Sequence[int]
) -> list[Link]:
    """Links to these ranks, which connect here."""
    found: dict[int, socket.socket] = {}
    end = time.monotonic() + _ALL_SECONDS
    while len(found) < len(firsts):
        listening.settimeout(max(0.01, end - time.monotonic()))
        connection, _ = listening.accept()
        connection.settimeout(_TRY_SECONDS)
        with suppress(OSError):
            said = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
            first = struct.unpack("=I", said[_TOKEN_BYTES:])[0] if len(said) > 19 else -1
            if hmac.compare_digest(said[:_TOKEN_BYTES], token) and first in firsts:
                connection.sendall(token)
                found[first] = connection
                continue
        connection.close()
    behind = {first: [r for r, of in enumerate(shares) if of == first] for first in found}
    return [Link(connection, behind[first]) for first, connection in sorted(found.items())]


def _connect(where: Sequence[str], port: int, token: bytes, rank: int) -> socket.socket:
    """A connection to the one who listens at one of these addresses."""
    problem: OSError = OSError("it has no address")
    for address in where:
        try:
            connection = socket.create_connection((address, port), _TRY_SECONDS)
            connection.sendall(token + struct.pack("=I", rank))
            if hmac.compare_digest(connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL), token):
                return connection
            problem = OSError(f"{address} is somebody else's")
        except OSError as error:
            problem = error
    raise problem


def addresses() -> list[str]:
    """This host's addresses, the loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                told = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(told[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))
