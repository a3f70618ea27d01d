"""What other libraries ask the environment for: who a process is, and where its ranks meet.

torch reads it in ``init_process_group()``, accelerate in ``Accelerator()``, which trains every rank
alone where it is missing, without a word. JAX is told by `for_jax`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from allranks.collectives.start import for_jax, for_torch

if TYPE_CHECKING:
    from mpi4py import MPI

_LOOPBACK = "127.0.0.1"
#: One for torch's store, one for JAX's coordinator: both run in the first rank.
_PORTS = 2

_ON_ITS_OWN = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""Of a rank that sees one GPU only. torch takes LOCAL_RANK for the number of a GPU, and there is no
other than 0: `DeviceMesh` does so by itself, and so does nearly every script."""


class Meeting:
    """A world's place in the environment of one of its ranks. Collective over ``base``, all ranks.

    ``hosts`` holds for every rank the number of its host.
    """

    def __init__(self, base: MPI.Intracomm, hosts: Sequence[int]) -> None:
        rank = base.Get_rank()
        one_host = len(set(hosts)) == 1
        self._held: list[socket.socket] = []
        told: tuple[str, list[int]] | None = None
        if rank == 0:
            self._held = [_reserved() for _ in range(_PORTS)]
            ports = [held.getsockname()[1] for held in self._held]
            told = _LOOPBACK if one_host else socket.gethostname(), ports
        address, (torch_port, jax_port) = base.bcast(told)
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        self._who = {
            "RANK": rank,
            "WORLD_SIZE": len(hosts),
            "LOCAL_RANK": here.index(rank),
            "LOCAL_WORLD_SIZE": len(here),
            for_jax.RANK: rank,
            for_jax.SIZE: len(hosts),
        }
        self._where = {
            "MASTER_ADDR": address,
            "MASTER_PORT": torch_port,
            for_jax.ADDRESS: f"{address}:{jax_port}",
        }
        if one_host:
            self._where[for_jax.BIND] = f"{_LOOPBACK}:{jax_port}"

    def withdraw(self) -> None:
        """This place is announced no longer, where it is, and its ports are given back."""
        for name, value in self._where.items():
            if os.environ.get(name) == str(value):
                del os.environ[name]
        for held in self._held:
            held.close()

    def announce(self) -> None:
        """From now on this process's environment says so; a place that the user has named stays."""
        for name, value in (self._who | (_ON_ITS_OWN if _sees_one_gpu() else {})).items():
            os.environ[name] = str(value)
        for name, value in self._where.items():
            os.environ.setdefault(name, str(value))
        for_jax.install()
        for_torch.install()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, the environment tells of this world only, whatever it told of before."""
        names = [*self._who, *self._where]
        before = {name: os.environ.get(name) for name in (*names, for_jax.BIND)}
        for name in before:
            os.environ.pop(name, None)
        try:
            self.announce()
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def _reserved() -> socket.socket:
    """A socket that keeps its port from being given to anybody who asks for any.

    It does not listen, so that a library which asks for this port gets it beside the socket.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def _sees_one_gpu() -> bool:
    """Whether this process has been shown one GPU, out of however many."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return bool(visible) and "," not in visible and not visible.startswith("-")
