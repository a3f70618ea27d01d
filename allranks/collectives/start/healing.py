"""New processes take the place of ranks that have died; the others stay what they are.

Those that are left shrink their communicator, spawn the new ones and merge with them. What all of
them need is agreed on and shared as at the start; nothing of a rank changes before all have said
that they have it. Who meets an error on the way revokes the communicator, so that nobody stays in
it, and the whole of it can be tried again.

Source: MPI 5.0, chapter 11.8, and User Level Failure Mitigation.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.collectives import world as worlds
from allranks.collectives.host import desk, memory
from allranks.collectives.start import exit as ending
from allranks.collectives.start.meeting import Meeting
from allranks.collectives.start.under_mpi import found, load_mpi, meet, share, start
from allranks.collectives.world.world import World
from allranks.errors import UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

_HOLDS = "ALLRANKS_HOLDS"
"""For tests: a folder with named pipes, at which a new rank is held."""


@dataclass
class Told:
    """What a new rank has to be told of the world that it comes into."""

    epoch: int
    checks: bool
    late_seconds: float
    sets: dict[int, tuple[int, ...]] = field(default_factory=dict)


def heal(dead: Sequence[int], command: Sequence[str], epoch: int) -> None:
    """Takes in new processes for those that have died, and begins an epoch with them.

    Args:
        dead: their ranks, ascending.
        command: starts one of them, where the list of those still to be started follows.
        epoch: the number of the epoch.

    Raises:
        UsageError: the ranks cannot be replaced now, as another one has died.

    Collective over all ranks that are left.
    """
    this = worlds.current()
    assert this.mpi is not None
    if not this.shared_by_all:
        raise UsageError("expected memory that all ranks share, found none")
    with _revoking() as made:
        left = made.add(this.mpi.pristine.Shrink())
        if left.Get_size() != this.size - len(dead):
            raise UsageError(
                f"expected {this.size - len(dead)} ranks that are left, found {left.Get_size()}"
            )
        base = made.add(_spawn(made, left, command, dead).Split(0, this.rank))
        with _all_or_none(base):
            told = Told(epoch, this.checks, this.late_seconds, dict(this.sets))
            met = meet(base)
            block = found(met.block)
            met.node.Free()
            pristine, user = base.Dup(), base.Dup()
            meeting = Meeting(base, met.hosts)
            shared = _share_sets(base, _tell(base, told))
    # From here on nothing can fail: it concerns this process alone.
    this.board.move(met.board)
    if this.window is not None:
        this.window.show_again(dead)
    this.mpi.take_over(pristine, user)
    _open(this, met.shares, block, shared)
    if this.meeting is not None:
        this.meeting.withdraw()
    this.meeting = meeting
    meeting.announce()
    this.peers.died.clear()
    this.renewed(epoch)


def join(dead: Sequence[int]) -> None:
    """This process is a rank, in the place of the first of ``dead``; others follow it.

    Collective over all ranks, the new ones and those that are left.
    """
    mpi = load_mpi()
    _hold("join")
    with _revoking() as made:
        parent = mpi.Comm.Get_parent()
        made.keep(parent)
        come = made.add(parent.Merge(True))
        base = made.add(_spawn(made, come, (), dead[1:]).Split(0, dead[0]))
        with _all_or_none(base):
            this = start(base, sharing=True)
            told = _tell(base, None)
            shared = _share_sets(base, told)
    _hold("joined")
    this.checks, this.late_seconds = told.checks, told.late_seconds
    this.sets = dict(told.sets)
    for group, (ranks, block) in shared.items():
        this.open(group, ranks, block)
    worlds.set_process(this)
    if this.meeting is not None:
        this.meeting.announce()
    ending.install(this)
    this.begin()
    this.renewed(told.epoch)


def _spawn(
    made: _Made, comm: MPI.Intracomm, command: Sequence[str], dead: Sequence[int]
) -> MPI.Intracomm:
    """Adds a new process for each that has died, one after the other; rank 0 has the command.

    Each is a job of its own: the launcher ends all of a job that was spawned with one of it.
    """
    mpi = load_mpi()
    for index in range(len(dead)):
        program, *arguments = [*command, json.dumps(list(dead[index:]))]
        between = comm.Spawn(program, arguments, 1, mpi.INFO_NULL, 0)
        made.keep(between)
        comm = made.add(between.Merge(False))
    return comm


class _Made:
    """The communicators that were made on the way."""

    def __init__(self) -> None:
        self.comms: list[Any] = []

    def add(self, made: MPI.Comm) -> MPI.Intracomm:
        comm: MPI.Intracomm = load_mpi().Intracomm(made)
        self.keep(comm)
        return comm

    def keep(self, comm: MPI.Comm) -> None:
        comm.Set_errhandler(load_mpi().ERRORS_RETURN)
        self.comms.append(comm)


@contextmanager
def _revoking() -> Iterator[_Made]:
    """Within, an error has all others leave the communicators that were made so far."""
    made, mpi = _Made(), load_mpi()
    try:
        yield made
    except BaseException as error:
        for comm in made.comms:
            comm.Revoke()
        if isinstance(error, mpi.Exception):
            raise UsageError(f"the ranks cannot be replaced now: {error}") from error
        raise


@contextmanager
def _all_or_none(base: MPI.Intracomm) -> Iterator[None]:
    """Within, each rank makes what it needs; an error of one of them has all of them fail."""
    mpi = load_mpi()
    try:
        yield
    except BaseException as error:
        # A call that another rank's error has ended may return what cannot be unpickled.
        garbled = base.Is_revoked() and not isinstance(error, (UsageError, mpi.Exception))
        base.Revoke()
        with suppress(mpi.Exception):
            base.Agree(0)
        if garbled and isinstance(error, Exception):
            raise mpi.Exception(mpi.ERR_REVOKED) from error
        raise
    if not base.Agree(1):
        raise mpi.Exception(mpi.ERR_REVOKED)


def _hold(where: str) -> None:
    """For tests: waits for whoever opens the pipe of that name to close it."""
    folder = os.environ.get(_HOLDS)
    with suppress(OSError):
        if folder:
            Path(folder, where).read_bytes()


def _tell(base: MPI.Intracomm, told: Told | None) -> Told:
    """What the ranks that are left tell the new ones."""
    said: list[Told] = [each for each in base.allgather(told) if each is not None]
    return said[0]


Shared = dict[int, tuple[tuple[int, ...], mmap.mmap]]


def _share_sets(base: MPI.Intracomm, told: Told) -> Shared:
    """The memory of each process set that this rank is in. Collective over all ranks."""
    sets: Shared = {}
    for number, ranks in sorted(told.sets.items()):
        member = base.Get_rank() in ranks
        part = base.Split(0 if member else load_mpi().UNDEFINED, base.Get_rank())
        if member:
            nbytes = memory.rounded(desk.nbytes(1, len(ranks), len(ranks)))
            sets[number] = ranks, found(share(load_mpi().Intracomm(part), nbytes))
            part.Free()
    return sets


def _open(this: World, shares: tuple[int, ...], block: mmap.mmap, shared: Shared) -> None:
    """Gives the groups of a rank that was left their new memory."""
    this.shares = shares
    this.open(0, tuple(range(this.size)), block, now=False)
    for number, (ranks, block) in shared.items():
        this.open(number, ranks, block)
