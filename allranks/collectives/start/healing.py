"""Replaces ranks that have died by new processes; the other ranks keep their numbers and memory.

The surviving ranks shrink their communicator, spawn the new processes and merge with them. They
agree on what all of them need, and share it, as at the start; no rank changes its state before all
have confirmed that they have everything. A rank that meets an error on the way revokes the
communicator, so that no rank waits in it, and the whole can be tried again.

Source: MPI 5.0, chapter 11.8, and User Level Failure Mitigation.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.collectives import world as worlds
from allranks.collectives.start.runtime import finish_at_exit
from allranks.collectives.start.under_mpi import (
    Rendezvous,
    find_hosts,
    load_mpi,
    required,
    share,
    start,
)
from allranks.collectives.world.world import group_nbytes
from allranks.errors import UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

_HOLDS = "ALLRANKS_HOLDS"
"""For tests: a folder with named pipes, at each of which a new rank waits."""


@dataclass
class ReplacementInfo:
    """The state of the world that a new rank joins."""

    epoch: int
    checks: bool
    late_seconds: float
    sets: dict[int, tuple[int, ...]]


def heal(dead: Sequence[int], command: Sequence[str], epoch: int) -> None:
    """Replaces dead ranks by new processes, and begins an epoch with them. ``command`` starts one
    of them, followed by the list of those still to be started. Raises `UsageError` if another rank
    has died meanwhile. Collective over all surviving ranks.
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
        merged = _spawn(made, left, command, dead)
        base = made.add(merged.Split(0, this.rank))
        with _all_or_none(merged, base):
            info = ReplacementInfo(epoch, this.checks, this.late_seconds, this.sets)
            layout = find_hosts(base)
            block = required(layout.block)
            layout.node.Free()
            pristine, user = base.Dup(), base.Dup()
            rendezvous = Rendezvous(base, layout.hosts)
            info = _exchange_info(base, info)
            shared = _share_sets(base, info)
    # From here on nothing can fail: the rest concerns this process alone.
    this.board.move(layout.board)
    if this.window is not None:
        this.window.publish_again(dead)
    this.mpi.take_over(pristine, user)
    this.sets, this.shares = info.sets, layout.shares
    this.open(0, tuple(range(this.size)), block, now=False)
    for number, (ranks, part) in shared.items():
        this.open(number, ranks, part)
    if this.rendezvous is not None:
        this.rendezvous.withdraw()
    this.rendezvous = rendezvous
    rendezvous.announce()
    this.died.clear()
    this.renewed(epoch)


def join(dead: Sequence[int]) -> None:
    """Makes this process the first rank of ``dead``, and spawns the rest. Collective over all."""
    mpi = load_mpi()
    _hold("join")
    with _revoking() as made:
        parent = mpi.Comm.Get_parent()
        made.keep(parent)
        merged = _spawn(made, made.add(parent.Merge(True)), (), dead[1:])
        base = made.add(merged.Split(0, dead[0]))
        with _all_or_none(merged, base):
            this = start(base, sharing=True)
            info = _exchange_info(base, None)
            shared = _share_sets(base, info)
    _hold("joined")
    this.joined_epoch = info.epoch
    this.checks, this.late_seconds = info.checks, info.late_seconds
    this.sets = info.sets
    for number, (ranks, part) in shared.items():
        this.open(number, ranks, part)
    worlds.set_process(this)
    if this.rendezvous is not None:
        this.rendezvous.announce()
    finish_at_exit(this)
    this.begin()
    this.renewed(info.epoch)


def _spawn(
    made: _Made, comm: MPI.Intracomm, command: Sequence[str], dead: Sequence[int]
) -> MPI.Intracomm:
    """Adds a new process for each dead rank, one after the other; only rank 0 has the command.

    The new processes are the last ranks of the communicator that it returns.
    """
    for index in range(len(dead)):
        program, *arguments = [*command, json.dumps(list(dead[index:]))]
        # Each as its own job: the launcher ends all processes of a spawned job with one.
        between = comm.Spawn(program, arguments, 1, made.mpi.INFO_NULL, 0)
        made.keep(between)
        comm = made.add(between.Merge(False))
    return comm


class _Made:
    """The communicators made so far."""

    def __init__(self) -> None:
        self.mpi = load_mpi()
        self.comms: list[Any] = []

    def add(self, made: MPI.Comm) -> MPI.Intracomm:
        comm: MPI.Intracomm = self.mpi.Intracomm(made)
        self.keep(comm)
        return comm

    def keep(self, comm: MPI.Comm) -> None:
        comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        self.comms.append(comm)


@contextmanager
def _revoking() -> Iterator[_Made]:
    """Within, an error revokes the communicators made so far, so that other ranks leave them."""
    made = _Made()
    try:
        yield made
    except BaseException as error:
        for comm in made.comms:
            comm.Revoke()
        if isinstance(error, made.mpi.Exception):
            raise UsageError(f"the ranks cannot be replaced now: {error}") from error
        raise


@contextmanager
def _all_or_none(merged: MPI.Intracomm, base: MPI.Intracomm) -> Iterator[None]:
    """Within, each rank makes what it needs from ``base``; if one of them fails, all do.

    They agree on that in ``merged``, whose last ranks are the new processes. Open MPI passes the
    result down a binary tree of the ranks and does not wait until it has arrived. A new process
    ends after a failure, and would not pass it on; in ``merged`` no surviving rank is below one.
    """
    mpi = load_mpi()
    try:
        yield
    except BaseException as error:
        # A call that another rank's error has ended may return data that cannot be unpickled.
        garbled = base.Is_revoked() and not isinstance(error, (UsageError, mpi.Exception))
        base.Revoke()
        with suppress(mpi.Exception):
            merged.Agree(0)
        if garbled and isinstance(error, Exception):
            raise mpi.Exception(mpi.ERR_REVOKED) from error
        raise
    if not merged.Agree(1):
        raise mpi.Exception(mpi.ERR_REVOKED)


def _hold(where: str) -> None:
    """For tests: waits until the test closes the pipe of that name."""
    folder = os.environ.get(_HOLDS)
    with suppress(OSError):
        if folder:
            Path(folder, where).read_bytes()


def _exchange_info(base: MPI.Intracomm, info: ReplacementInfo | None) -> ReplacementInfo:
    # A death may have left a process set on some ranks only.
    known: list[ReplacementInfo] = [each for each in base.allgather(info) if each is not None]
    return replace(known[0], sets={n: ranks for each in known for n, ranks in each.sets.items()})


SetMemory = dict[int, tuple[tuple[int, ...], mmap.mmap]]


def _share_sets(base: MPI.Intracomm, info: ReplacementInfo) -> SetMemory:
    """The memory of each process set that this rank is in. Collective over all ranks."""
    sets: SetMemory = {}
    for number, ranks in sorted(info.sets.items()):
        member = base.Get_rank() in ranks
        part = base.Split(0 if member else load_mpi().UNDEFINED, base.Get_rank())
        if member:
            nbytes = group_nbytes(1, len(ranks), len(ranks))
            sets[number] = ranks, required(share(load_mpi().Intracomm(part), nbytes))
            part.Free()
    return sets
