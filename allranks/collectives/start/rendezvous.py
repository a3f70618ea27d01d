"""The variables by which torch, JAX and other libraries find their rank and the meeting place.

They ask the environment: torch in ``init_process_group()``, accelerate in ``Accelerator()``, which
trains every rank alone, without a message, where the variables are missing.

JAX asks the launchers on its list. Open MPI 5 and MPICH are not among them, and inside a job of
Slurm it would take the job's one task for the whole world. For other launchers it has a class to
derive from; `install_for_jax` derives from it as soon as JAX is imported.

torch's first rank keeps the addresses of all ranks in a store, which ends with the last object that
refers to the group: a model, say, that has stayed in the notebook. The next group would find the
addresses of the one before, and wait there for ever. So there is one store for the life of the
rank, and each group has its own keys in it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from allranks.collectives import world
from allranks.post_import import PostImportHook

if TYPE_CHECKING:
    from mpi4py import MPI

JAX_ADDRESS, JAX_BIND = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's variables: the coordinator's address, and the address at which it listens."""
JAX_RANK, JAX_SIZE = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"


def _register_with_jax(clusters: Any) -> None:
    """Makes our kind of cluster the first that JAX asks for."""
    base = clusters.ClusterEnv
    if any(known.name == "allranks" for known in base._cluster_types):
        return

    class AllranksCluster(base):  # type: ignore[misc, valid-type]
        name = "allranks"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(name in os.environ for name in (JAX_ADDRESS, JAX_RANK, JAX_SIZE))

        @classmethod
        def get_coordinator_address(cls, *_: Any, **__: Any) -> str:
            return os.environ[JAX_ADDRESS]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ[JAX_SIZE])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ[JAX_RANK])

    # The derived class was appended at the end, and JAX takes the first that is present.
    base._cluster_types.remove(AllranksCluster)
    base._cluster_types.insert(0, AllranksCluster)


install_for_jax = PostImportHook(["jax._src.clusters"], _register_with_jax).install
"""Registers with JAX when it is imported, or now if it has been imported."""


_SCHEME = "env"


class TorchGroupKeys:
    """Counts the groups of a cell: all ranks make the same groups, in the same order."""

    def __init__(self) -> None:
        self.number = self.made = self.at_ns = 0

    def next(self) -> str:
        """The prefix of the next group's keys, the same on every rank."""
        number = world.current().scope.number
        self.made = self.made + 1 if number == self.number else 1
        self.number, self.at_ns = number, time.time_ns()
        return f"allranks/{number}/{self.made}"


_keys = TorchGroupKeys()
_stores: dict[tuple[str, str], Any] = {}
"""The stores of this rank, by address and port; never closed."""


def _wrap_torch_rendezvous(rendezvous: Any) -> None:
    """Wraps torch's handler that finds the store by the environment."""
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    own = handlers.get(_SCHEME)
    if own is None or hasattr(own, "allranks"):
        return

    def meet(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        if not world.exists():
            yield from own(url, *args, **kwargs)
            return
        prefix = _keys.next()
        if os.environ.get("RANK") == "0":
            where = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
            if all(where) and where not in _stores:
                _stores[where] = torch_store()
        for found, rank, size in own(url, *args, **kwargs):
            yield sys.modules["torch.distributed"].PrefixStore(prefix, found), rank, size

    meet.allranks = True  # type: ignore[attr-defined]
    handlers[_SCHEME] = meet


def torch_store() -> Any:
    make = sys.modules["torch.distributed"].TCPStore
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # multi_tenant: stores that torch opens at this address and port use the same server.
    return make(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)


def torch_groups_made() -> int:
    return _keys.made if _keys.number == world.current().scope.number else 0


def torch_met_at_ns() -> int:
    """When this rank last began to make a group, by the system's clock."""
    return _keys.at_ns


install_for_torch = PostImportHook(["torch.distributed.rendezvous"], _wrap_torch_rendezvous).install
"""Wraps torch's handler when torch is imported, or now if it has been imported."""


_LOOPBACK = "127.0.0.1"
_PORTS = 2
"""One for torch's store, one for JAX's coordinator; both run in the first rank."""

_ON_ITS_OWN = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""For a rank that sees one GPU only. `DeviceMesh` and most scripts take LOCAL_RANK as the number of
a GPU, and there is none but 0."""


class Rendezvous:
    """The variables by which libraries find a world, on one of its ranks. Collective over
    ``base``. ``hosts`` holds for every rank the number of its host.
    """

    def __init__(self, base: MPI.Intracomm, hosts: Sequence[int]) -> None:
        rank = base.Get_rank()
        one_host = len(set(hosts)) == 1
        self._held: list[socket.socket] = []
        place: tuple[str, list[int]] | None = None
        if rank == 0:
            self._held = [_reserved() for _ in range(_PORTS)]
            ports = [held.getsockname()[1] for held in self._held]
            place = _LOOPBACK if one_host else socket.gethostname(), ports
        address, (torch_port, jax_port) = base.bcast(place)
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        self._who = {
            "RANK": rank,
            "WORLD_SIZE": len(hosts),
            "LOCAL_RANK": here.index(rank),
            "LOCAL_WORLD_SIZE": len(here),
            JAX_RANK: rank,
            JAX_SIZE: len(hosts),
        }
        self._where = {
            "MASTER_ADDR": address,
            "MASTER_PORT": torch_port,
            JAX_ADDRESS: f"{address}:{jax_port}",
        }
        if one_host:
            self._where[JAX_BIND] = f"{_LOOPBACK}:{jax_port}"

    def withdraw(self) -> None:
        """Removes these addresses from the environment if they are in it, and frees the ports."""
        for name, value in self._where.items():
            if os.environ.get(name) == str(value):
                del os.environ[name]
        for held in self._held:
            held.close()

    def announce(self) -> None:
        """Sets this process's environment; keeps an address that the user has set."""
        for name, value in (self._who | (_ON_ITS_OWN if _sees_one_gpu() else {})).items():
            os.environ[name] = str(value)
        for name, value in self._where.items():
            os.environ.setdefault(name, str(value))
        install_for_jax()
        install_for_torch()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, the environment holds the variables of this world only."""
        names = [*self._who, *self._where]
        before = {name: os.environ.get(name) for name in (*names, JAX_BIND)}
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
    """A socket that reserves a free port, so that no other program gets it."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Without listening, so that a library can bind this port beside the socket.
    held.bind(("", 0))
    return held


def _sees_one_gpu() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return bool(visible) and "," not in visible and not visible.startswith("-")
