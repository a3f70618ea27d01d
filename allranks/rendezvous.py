"""How torch, JAX and other libraries find the ranks: by variables of the environment.

Runs in every rank, also in scripts under mpiexec, which load no features: `allranks.announcements`
lists it. The feature `torch_jax` adds to it in notebooks.
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
_JAX_RANK, _JAX_SIZE = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"
_JAX_GPUS = "JAX_LOCAL_DEVICE_IDS"


def _register_with_jax(clusters: Any) -> None:
    """Makes our kind of cluster the first that JAX asks for."""
    # Open MPI 5 and MPICH are not among the launchers that JAX knows. Inside a job of Slurm it
    # would take the job's one task for the whole world.
    base = clusters.ClusterEnv
    if any(known.name == "allranks" for known in base._cluster_types):
        return

    class AllranksCluster(base):  # type: ignore[misc, valid-type]
        name = "allranks"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(name in os.environ for name in (JAX_ADDRESS, _JAX_RANK, _JAX_SIZE))

        @classmethod
        def get_coordinator_address(cls, *_: Any, **__: Any) -> str:
            return os.environ[JAX_ADDRESS]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ[_JAX_SIZE])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ[_JAX_RANK])

    # The derived class was appended at the end, and JAX takes the first that is present.
    base._cluster_types.remove(AllranksCluster)
    base._cluster_types.insert(0, AllranksCluster)


class TorchGroupKeys:
    """Counts the groups of torch that this rank makes in a cell, so that each has its own keys."""

    def __init__(self) -> None:
        self.number = self.made = self.at_ns = 0

    def made_in_cell(self) -> int:
        number = world.current().scope.number
        if number != self.number:
            self.number, self.made = number, 0
        return self.made

    def next(self) -> str:
        """The prefix of the next group's keys, the same on every rank that has made as many."""
        self.made, self.at_ns = self.made_in_cell() + 1, time.time_ns()
        return f"allranks/{self.number}/{self.made}"


torch_group_keys = TorchGroupKeys()
_stores: dict[tuple[str, str], Any] = {}
"""The stores of this rank, by address and port; never closed."""


def _wrap_torch_rendezvous(rendezvous: Any) -> None:
    """Wraps torch's handler that finds the store by the environment."""
    # torch's first rank keeps the addresses of all ranks in a store, which ends with the last
    # object that refers to the group: a model, say, that has stayed in the notebook. The next group
    # would find the addresses of the one before, and wait there for ever. So there is one store for
    # the life of the rank, and each group has its own keys in it.
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    own = handlers.get("env")
    if own is None or hasattr(own, "allranks"):
        return

    process = os.getpid()

    def find_store(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        if not world.exists() or os.getpid() != process:  # one that the rank has forked
            yield from own(url, *args, **kwargs)
            return
        prefix = torch_group_keys.next()
        if os.environ.get("RANK") == "0":
            where = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
            if all(where) and where not in _stores:
                _stores[where] = torch_store()
        for found, rank, size in own(url, *args, **kwargs):
            yield sys.modules["torch.distributed"].PrefixStore(prefix, found), rank, size

    find_store.allranks = True  # type: ignore[attr-defined]
    handlers["env"] = find_store


def torch_store() -> Any:
    make = sys.modules["torch.distributed"].TCPStore
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # multi_tenant: stores that torch opens at this address and port use the same server.
    return make(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)


def torch_met_at_ns() -> int:
    """When this rank last began to make a group, by the system's clock."""
    return torch_group_keys.at_ns


_HOOKS = (
    PostImportHook(["jax._src.clusters"], _register_with_jax),
    PostImportHook(["torch.distributed.rendezvous"], _wrap_torch_rendezvous),
)
_LOOPBACK = "127.0.0.1"
_ON_ITS_OWN = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""For a rank that sees one GPU only. `DeviceMesh` and most scripts take LOCAL_RANK as the number of
a GPU, and there is none but 0."""


class Rendezvous:
    """The variables by which libraries find a world, on one of its ranks. Collective over
    ``base``. ``hosts`` holds for every rank the number of its host.

    torch asks the environment in ``init_process_group()``, accelerate in ``Accelerator()``, which
    trains every rank alone, without a message, where the variables are missing.
    """

    def __init__(self, base: MPI.Intracomm, hosts: Sequence[int]) -> None:
        rank = base.Get_rank()
        one_host = len(set(hosts)) == 1
        self._held: list[socket.socket] = []
        place: tuple[str, list[int]] | None = None
        if rank == 0:
            # For torch's store and for JAX's coordinator, which run in the first rank.
            self._held = [_reserved(), _reserved()]
            ports = [held.getsockname()[1] for held in self._held]
            place = _LOOPBACK if one_host else socket.gethostname(), ports
        address, (torch_port, jax_port) = base.bcast(place)
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        self._who = {
            "RANK": rank,
            "WORLD_SIZE": len(hosts),
            "LOCAL_RANK": here.index(rank),
            "LOCAL_WORLD_SIZE": len(here),
            _JAX_RANK: rank,
            _JAX_SIZE: len(hosts),
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
        sees_one_gpu = _sees_one_gpu()
        for name, value in (self._who | (_ON_ITS_OWN if sees_one_gpu else {})).items():
            os.environ[name] = str(value)
        if sees_one_gpu:
            os.environ.setdefault(_JAX_GPUS, "0")
        for name, value in self._where.items():
            os.environ.setdefault(name, str(value))
        for hook in _HOOKS:
            if hook not in sys.meta_path:
                hook.install()  # at once where the library has been imported

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, the environment holds the variables of this world only."""
        names = (*self._who, *self._where, JAX_BIND)
        before = {name: os.environ.pop(name, None) for name in names}
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
