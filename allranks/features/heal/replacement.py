"""Replaces ranks that have died by new processes; the other ranks keep their numbers and memory.

The surviving ranks shrink their communicator, spawn the new processes and merge with them. They
agree on what all of them need, and share it, as at the start; no rank changes its state before all
have confirmed that they have everything. A rank that meets an error on the way revokes the
communicator, so that no rank waits in it, and the whole can be tried again.

On several hosts, Open MPI spawns a process for the first death only: the next one cannot connect
to it. So the launcher starts spare processes with the ranks (`Spare`), in one job, and all living
processes shrink their communicator. A new try begins with the same communicator on all of them,
whatever the last one has changed.

Source: MPI 5.0, chapter 11.8, and User Level Failure Mitigation.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.collectives import world as worlds
from allranks.collectives.start.runtime import announce, begin, finish_at_exit
from allranks.collectives.start.under_mpi import (
    HostLayout,
    WorldParts,
    check_launched,
    load_mpi,
    make_parts,
    new_world,
    required,
    revoked_by_errors,
    share,
)
from allranks.collectives.world.world import World, group_nbytes
from allranks.errors import UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

_ANSWERING_SECONDS, _TOGETHER_SECONDS, _PAUSE_SECONDS = 1.0, 5.0, 1e-3
_HOLDS = "ALLRANKS_HOLDS"
"""For tests: a folder with named pipes, at each of which a new rank waits."""


@dataclass
class ReplacementInfo:
    """The state of the world that a new rank joins."""

    epoch: int
    checks: bool
    late_seconds: float
    sets: dict[int, tuple[int, ...]]


def replace_ranks(dead: Sequence[int], command: Sequence[str], epoch: int) -> None:
    """Replaces dead ranks by new processes, and begins an epoch with them. On one host ``command``
    starts one of them, followed by the list of those still to be started. Raises `UsageError` if
    another rank has died meanwhile. Collective over all surviving ranks.
    """
    this = worlds.current()
    assert this.mpi is not None
    info = ReplacementInfo(epoch, this.checks, this.late_seconds, this.sets)
    if this.mpi.everyone is not None:
        with _answering(), _revoking() as made:
            everyone = this.mpi.everyone = made.add(this.mpi.everyone.Shrink())
            merged, base = _with_spares(made, everyone, this.rank, this.rank, this.size)
            with _all_or_none(merged, base):
                parts = make_parts(base)
                info = _exchange_info(base, info)
                _take_over(this, dead, parts, info, _share_sets(base, info, parts.layout))
            _end_together(merged)
        return
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
            parts = make_parts(base)
            required(parts.layout.block)
            info = _exchange_info(base, info)
            shared = _share_sets(base, info, parts.layout)
    # From here on nothing can fail: the rest concerns this process alone.
    _take_over(this, dead, parts, info, shared)


def _take_over(
    this: World, dead: Sequence[int], parts: WorldParts, info: ReplacementInfo, shared: SetMemory
) -> None:
    """Moves a surviving rank to new parts. Collective over the first ranks of several hosts."""
    assert this.mpi is not None
    layout = parts.layout
    this.hosts, this.shares = layout.hosts, layout.shares
    if parts.links is not None:
        parts.links.end_before(this)
    this.board.move(layout.board)
    if parts.links is not None:
        parts.links.start(this)
    if this.window is not None:
        this.window.publish_again(dead)
    this.mpi.take_over(parts.pristine, parts.user)
    this.sets, this.offset_seconds = info.sets, parts.offset_seconds
    # Where no survivor was in a call: what they have open of the GPU of the dead ones ends too.
    for group in list(this.groups.values()):
        group.abandon()
    this.open(0, tuple(range(this.size)), layout.block, now=False)
    for number, (ranks, part) in shared.items():
        this.open(number, ranks, part)
    for one in this.announcements:
        one.withdraw()
    this.announcements = parts.announcements
    announce()
    this.died.clear()
    this.renewed(info.epoch)


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
            parts = make_parts(base)
            required(parts.layout.block)
            info = _exchange_info(base, None)
            shared = _share_sets(base, info, parts.layout)
    _hold("joined")
    _begin_as(dead[0], parts, info, shared)


def _begin_as(rank: int, parts: WorldParts, info: ReplacementInfo, shared: SetMemory) -> World:
    """The world of a process that has become a rank, as `_take_over`."""
    this = new_world(rank, parts)
    assert this.mpi is not None
    this.mpi.creation.through_tcp = True
    this.joined_epoch, this.lacks_variables = info.epoch, True
    this.checks, this.late_seconds = info.checks, info.late_seconds
    this.sets = info.sets
    for number, (ranks, part) in shared.items():
        this.open(number, ranks, part)
    worlds.set_process(this)
    announce()
    finish_at_exit(this)
    this.begin()
    this.renewed(info.epoch)
    return this


def _leave(this: World) -> None:
    # Ends the threads of a world that another one takes the place of.
    if this.line_reporter is not None:
        this.line_reporter.stop()
    if this.stop_exchange is not None:
        this.stop_exchange()


def begin_beside_spares(rank: int, processes: int) -> None:
    """Makes this process a rank, as ``init``, where some of the job's processes are spare ones.

    Collective over all of them.
    """
    everyone = _everyone(processes)
    begin(load_mpi().Intracomm(everyone.Split(0, rank)))
    mpi = worlds.current().mpi
    assert mpi is not None
    mpi.everyone = everyone


def _everyone(processes: int) -> MPI.Intracomm:
    mpi = load_mpi()
    check_launched(mpi.COMM_WORLD.Get_size(), mpi.Get_library_version())
    if mpi.COMM_WORLD.Get_size() != processes:
        raise UsageError(
            f"expected {processes} processes, with the spare ones, found "
            f"{mpi.COMM_WORLD.Get_size()}"
        )
    everyone: MPI.Intracomm = mpi.Intracomm(mpi.COMM_WORLD.Dup())
    everyone.Set_errhandler(mpi.ERRORS_RETURN)
    return everyone


class Spare:
    """A process that has no rank, and waits to take the place of one that dies: see
    `RankFeature.spare`.
    """

    def __init__(self, wake: int, size: int, processes: int) -> None:
        self._lines = os.fdopen(wake)
        self._size = size
        self._everyone = _everyone(processes)
        self._everyone.Split(load_mpi().UNDEFINED)

    def wait(self) -> tuple[int, list[int], dict[str, str]]:
        """Returns the rank, the dead ranks and the variables once there is a rank for it."""
        while (asked := self._asked())["rank"] < 0:
            with suppress(load_mpi().Exception):  # the ranks try again
                self._shrink().Split(load_mpi().UNDEFINED)
        return asked["rank"], asked["dead"], asked["variables"]

    def join(self, rank: int) -> None:
        """Joins the ranks. Collective over all living processes. Waits for the next try if one
        fails.
        """
        while True:
            _hold("join")
            try:
                self._join(rank)
            except UsageError:
                if worlds.exists():
                    _leave(worlds.current())
                self._asked()
            else:
                return

    def _join(self, rank: int) -> None:
        with _answering(), _revoking() as made:
            made.keep(self._shrink())
            key = self._size + rank
            merged, base = _with_spares(made, self._everyone, key, rank, self._size)
            with _all_or_none(merged, base):
                parts = make_parts(base)
                info = _exchange_info(base, None)
                shared = _share_sets(base, info, parts.layout)
                _hold("joined")
                this = _begin_as(rank, parts, info, shared)
            _end_together(merged)
        assert this.mpi is not None
        this.mpi.everyone = self._everyone

    def _shrink(self) -> MPI.Intracomm:
        mpi = load_mpi()
        self._everyone = mpi.Intracomm(self._everyone.Shrink())
        self._everyone.Set_errhandler(mpi.ERRORS_RETURN)
        return self._everyone

    def _asked(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise SystemExit(0)  # the host agent is gone
        asked: dict[str, Any] = json.loads(line)
        return asked


@contextmanager
def _answering() -> Iterator[None]:
    """After an error, goes on for a moment to answer other processes about agreements of MPI.

    If the process dies that would pass the result of an agreement on, the others ask each other for
    it, and Open MPI answers only within its calls.
    """
    try:
        yield
    except BaseException:
        mpi = load_mpi()
        alone, end = mpi.Intracomm(mpi.COMM_SELF), time.monotonic() + _ANSWERING_SECONDS
        while time.monotonic() < end:
            alone.Iprobe()
            time.sleep(_PAUSE_SECONDS)
        raise


def _end_together(merged: MPI.Intracomm) -> None:
    """Waits until all ranks have the result of the agreement, and answers them, as `_answering`."""
    end = time.monotonic() + _TOGETHER_SECONDS
    with suppress(load_mpi().Exception):  # a rank that dies now is replaced next
        request = merged.Ibarrier()
        while not request.Test() and time.monotonic() < end:
            time.sleep(_PAUSE_SECONDS)


def _with_spares(
    made: _Made, everyone: MPI.Intracomm, key: int, rank: int, size: int
) -> tuple[MPI.Intracomm, MPI.Intracomm]:
    """The communicator of all ranks, the new ones last, and the same in the order of the ranks."""
    merged = made.add(everyone.Split(0, key))
    if merged.Get_size() != size:
        raise UsageError(f"expected {size} ranks with the new ones, found {merged.Get_size()}")
    return merged, made.add(merged.Split(0, rank))


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


SetMemory = dict[int, tuple[tuple[int, ...], mmap.mmap | None]]


def _share_sets(base: MPI.Intracomm, info: ReplacementInfo, layout: HostLayout) -> SetMemory:
    """The memory of each process set that this rank is in. Collective over all ranks."""
    mpi, me, shares = load_mpi(), base.Get_rank(), layout.shares
    sets: SetMemory = {}
    for number, ranks in sorted(info.sets.items()):
        part = base.Split(0 if me in ranks else mpi.UNDEFINED, me)
        if me in ranks:
            hosts = {shares[rank] for rank in ranks}
            here = [rank for rank in ranks if shares[rank] == shares[me]]
            with revoked_by_errors(mpi.Intracomm(part)):
                node = mpi.Intracomm(part.Split(shares[me], me))
                with revoked_by_errors(node):
                    memory = share(node, group_nbytes(len(hosts), len(here), len(ranks)))
                    if len(hosts) == 1:
                        required(memory)
                    whole = all(part.allgather(memory is not None))
            sets[number] = ranks, memory if whole else None
            node.Free()
            part.Free()
    return sets
