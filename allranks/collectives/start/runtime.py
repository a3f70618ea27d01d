"""init, shutdown, a rank's questions about itself and its world, and the end of its process."""

from __future__ import annotations

import atexit
import faulthandler
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from allranks import launched
from allranks.collectives import world
from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.call import Pause
from allranks.collectives.calls.sites import find, of_traceback
from allranks.collectives.ops import operations
from allranks.collectives.world import process_sets as sets
from allranks.collectives.world.process_sets import ProcessSet
from allranks.collectives.world.world import World
from allranks.errors import UsageError
from allranks.records import config
from allranks.records.ranks import label
from allranks.records.telemetry import CallRecord

if TYPE_CHECKING:
    from mpi4py import MPI

    from allranks.collectives.ops.communicator import Comm

_CHECKS = "ALLRANKS_CHECKS"
_LATE = "ALLRANKS_LATE_SECONDS"
_AFTER_FAILURE_SECONDS = 10.0
_NOTEBOOK_SECONDS = 2.0
_FINALIZE_SECONDS = 5.0
_FINALIZE_SCRIPT_SECONDS = 30.0
"""Longer under mpiexec, which reports a failed job if a rank ends without MPI_Finalize."""
_installed: list[World] = []


def init(
    comm: MPI.Intracomm | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    *,
    checks: str | None = None,
    late_seconds: float | None = None,
) -> None:
    """Makes this process a rank: starts MPI, and finds the other ranks of its world.

    A second call registers further process sets and nothing else. Works under a notebook's engine,
    under ``mpiexec``, and alone.

    Args:
        comm: None for all processes of the job, a list of their ranks, or a communicator.
        process_sets: sets to register, the same on every rank, or sets of communicators. "dynamic"
            is accepted, because sets can always be added. A set that is registered already keeps
            its number.
        checks: "on", or "off" to skip the comparison of calls, for benchmarks; by default
            ALLRANKS_CHECKS.
        late_seconds: the time after which a late rank is reported; by default
            ALLRANKS_LATE_SECONDS, or 5.

    Raises:
        MissingDependency: there is no mpi4py, or no MPI library.
        UsageError: a variable of the environment is invalid, two process sets are the same, or
            an argument is not a process set.

    Collective over the ranks of ``comm``.
    """
    if not world.exists():
        begin(comm, checks, late_seconds)
    if comm is not None and not isinstance(comm, Sequence | np.ndarray):
        known = sets.ranks_of(comm, world.current())
        if sorted(known) == sets.global_process_set.ranks:
            sets.global_process_set.mpi_comm = comm
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise UsageError(
            f"init needs a list of process sets: found {process_sets!r:.60}. Type for example: "
            "init(process_sets=[[0, 1], [2, 3]])"
        )
    if process_sets is not None and not isinstance(process_sets, str):
        _register(process_sets)


def begin(
    comm: MPI.Intracomm | Sequence[int] | None,
    checks: str | None = None,
    late_seconds: float | None = None,
) -> None:
    """Makes this process a rank, as `init`, where it is none yet. Collective."""
    checked = (checks or config.variable_choice(_CHECKS, ("on", "off"), "on")) != "off"
    late = config.variable_seconds(_LATE, 5.0) if late_seconds is None else late_seconds
    from allranks.collectives.start.under_mpi import start

    this = start(comm)
    this.checks, this.late_seconds = checked, late
    world.set_process(this)
    if this.size > 1:
        # Not for a single rank: another launcher may have set the variables.
        announce()
    finish_at_exit(this)
    this.begin()


def announce() -> None:
    """Lets other libraries in this process find the ranks."""
    for one in world.current().announcements:
        one.announce()


def _register(process_sets: Sequence[ProcessSet | Sequence[int] | MPI.Comm]) -> None:
    """Registers several process sets; one whose ranks are registered already gets their number.

    They are the same on every rank, but that each rank's communicators may be its own. So that all
    ranks refuse what one of them has twice, each sees the sets of all.
    """
    this = world.current()
    chosen = [one if isinstance(one, ProcessSet) else ProcessSet(one) for one in process_sets]
    mine = [tuple(one.ranks) for one in chosen]
    by_rank = this.run(operations.begin_object_gather(this.groups[0], "process sets", mine))
    counts = [len(known) for known in by_rank]
    if len(set(counts)) > 1:
        raise UsageError(
            f"init needs the same number of process sets on every rank: found {counts}, by rank. "
            "Pass the same list on every rank, also on those that are not in the sets."
        )
    for known in by_rank:
        for index, ranks in enumerate(known):
            # A rank may be in no set that others have made by Split().
            if ranks and ranks in [tuple(range(this.size)), *known[:index]]:
                raise UsageError(
                    f"process_sets needs sets that differ: entry number {index}, "
                    f"{label(ranks)}, is a duplicate. All ranks are global_process_set."
                )
    for index, one in enumerate(chosen):
        parts = [known[index] for known in by_rank] if one.mpi_comm is not None else [mine[index]]
        for ranks in dict.fromkeys(part for part in parts if part):
            sets.add_process_set(ranks)
        one.process_set_id = sets.number_of(mine[index])


def shutdown() -> None:
    """Ends collectives on this rank, and reports to the others that it has left. MPI ends at exit.

    In a notebook's cell it does nothing, as `init` does: the ranks are the notebook's, and the
    next cell needs them.
    """
    if world.exists() and not world.current().notebook:
        this = world.current()
        this.depart("it called shutdown()", False, "")
        if this.line_reporter is not None:
            this.line_reporter.stop()
        world.set_process(None)
        sets.global_process_set.mpi_comm = None


def is_initialized() -> bool:
    """True between `init` and `shutdown`."""
    return world.exists()


def rank() -> int:
    """This rank's number."""
    return world.current().rank


def size() -> int:
    """The number of ranks."""
    return world.current().size


def local_rank() -> int:
    """This rank's place among the ranks of its host."""
    this = world.current()
    return this.local_ranks.index(this.rank)


def local_size() -> int:
    """The number of ranks on this rank's host."""
    return world.current().local_size


def cross_rank() -> int:
    """The place of this rank's host among the hosts that have a rank of the same local rank."""
    this = world.current()
    return _peers_of_hosts(this).index(this.rank)


def cross_size() -> int:
    """The number of hosts that have a rank of the same local rank."""
    return len(_peers_of_hosts(world.current()))


def is_homogeneous() -> bool:
    """True if every host has the same number of ranks."""
    hosts = world.current().hosts
    return len({hosts.count(host) for host in set(hosts)}) == 1


def communicator() -> Comm:
    """A communicator of all ranks for mpi4py's own calls, whose waits can be interrupted.

    It stays the same object and always stands for the current epoch's communicator.

    Raises:
        UsageError: this world has no MPI (the loopback).
    """
    this = world.current()
    if this.mpi is None:
        raise UsageError(
            "comm needs MPI, and the loopback has none. Use the functions of this module."
        )
    user: Comm = this.mpi.user
    return user


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> NDArray[Any]:
    """An uninitialised numpy array that the other ranks of this host can reduce in place.

    allreduce of such an array copies nothing. It behaves like any other array, and its memory is
    used again when it is freed. If ranks can share no memory it is an ordinary array.

    Args:
        shape: any.
        dtype: any. Shape and dtype may differ between ranks.
    """
    this, kind = world.current(), np.dtype(dtype)
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = math.prod(extents) * kind.itemsize
    # Without the world's lock, which another thread may have until this one makes a call.
    found = this.window.empty(extents, kind, nbytes) if this.window is not None else None
    return np.empty(extents, kind) if found is None else found


def renew(epoch: int | None = None) -> None:
    """Moves all ranks to a fresh communicator, and drops unfinished calls.

    Args:
        epoch: the new epoch's number, higher than before and the same on every rank; one more
            than the current one if it is None.

    Collective over all ranks: a rank that waits for this one in another call raises `RankLeft`. If
    it is interrupted or raises, call it again: it then goes on where it was left.

    Raises:
        RankLeft: a rank has left the cell, or the program, without calling it.
    """
    this = world.current()
    number = this.epoch + 1 if epoch is None else epoch
    if number <= this.epoch:
        raise UsageError(
            f"renew() needs an epoch after {this.epoch}: found {number}. Pass a higher number."
        )
    if this.mpi is None:
        raise UsageError("renew() needs MPI, and the loopback has none. Run the ranks again.")
    place = find(sys._getframe(1)).place
    with this.renewing(place):
        try:
            this.mpi.renew(number)
        except BaseException as error:
            # Until all ranks have made it, Open MPI makes no other communicator in this process.
            if this.epoch < number:  # else it is an interrupt at the end
                this.spoil(f"has left renew() at {place} ({type(error).__name__})")
            raise


def epoch() -> int:
    """The number of the current epoch."""
    return world.current().epoch


def dirty() -> bool:
    """True if this rank has left a collective unfinished, so that `renew` is needed."""
    return world.current().unfinished


def activity() -> str:
    """This rank's wait, as text ("waiting in allreduce(Sum) for rank 2"), or "".

    Other threads may call it.
    """
    doing = world.current().doing
    return str(doing) if doing.state.waits else ""


def died(rank: int, how: str, of: world.World | None = None) -> None:
    """Records that a rank has died: waits for it raise `RankLost` with ``how``. For any thread."""
    this = of or world.current()
    this.died[rank] = how
    if this.mpi is not None:
        this.mpi.creation.end()


def on_notice(callback: Callable[[str], None]) -> None:
    """Passes messages, for instance about late ranks, to ``callback`` instead of stderr."""
    world.current().notice = callback


def on_record(callback: Callable[[CallRecord], None] | None) -> None:
    """Passes every call's record to ``callback`` as soon as the call has ended."""
    world.current().journal.set_callback(callback)


def records() -> list[CallRecord]:
    """The records of this rank's calls, the last 100,000."""
    return world.current().journal.records


def _peers_of_hosts(this: world.World) -> list[int]:
    hosts = this.hosts
    places = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    mine = (rank for rank, place in enumerate(places) if place == places[this.rank])
    return sorted(mine, key=hosts.__getitem__)


def finish_at_exit(this: World) -> None:
    """Makes the process the scope: its end, by an exception or not, leaves the scope."""
    _installed.append(this)
    if len(_installed) > 1:
        return
    hook = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        where = of_traceback(tb).place
        _installed[-1].depart(f"raised {kind.__name__}: {error}", True, where)
        hook(kind, error, tb)

    sys.excepthook = failed
    atexit.register(finish)


def finish() -> None:
    """Finalizes MPI if the other ranks can take part; otherwise ends the process without it."""
    this = _installed[-1]
    from mpi4py import MPI

    if MPI.Is_finalized() or this.mpi is None:
        return
    this.depart("it ended", False, "")
    code = 1 if this.failed else 0
    if not _wait_for_all(this):
        _flush()
        if this.notebook:
            os._exit(code)
        MPI.COMM_WORLD.Abort(code or 1)
    # Only after the barrier: data that this rank has sent may still be on its way.
    for group in list(this.groups.values()):
        group.abandon()
    if this.gpu is not None:
        this.gpu.end()
        this.gpu.aborts.wait(_FINALIZE_SECONDS)
    _flush()
    patience = _FINALIZE_SECONDS if this.notebook else _FINALIZE_SCRIPT_SECONDS
    # Not a thread of Python's: MPI.Finalize lets none run until it returns, and from Python 3.12 on
    # none can be started now. faulthandler prints where the rank was, and ends it with code 1:
    # mpiexec reports a failed job if a rank ends without MPI_Finalize, whatever its code.
    faulthandler.dump_traceback_later(patience, exit=True, file=2)
    if MPI.COMM_WORLD.Get_size() == 1:
        launched.remove_segments(launched.OPEN_MPI)
    inspect.unwrap(MPI.Finalize)()  # without the guard of `guard_mpi4py`
    faulthandler.cancel_dump_traceback_later()


def _wait_for_all(this: World) -> bool:
    """Waits for the other ranks to end: without limit while they work, briefly after a failure."""
    assert this.mpi is not None
    request = this.mpi.pristine.Ibarrier()
    pause = Pause()
    while not request.Test():
        waited = pause()
        if this.notebook and waited > _NOTEBOOK_SECONDS:
            return False
        will_not_end = (_will_not_end(this.board, rank) for rank in range(this.size))
        if waited > _AFTER_FAILURE_SECONDS and (this.failed or any(will_not_end)):
            return False
    return True


def _will_not_end(board: fields.Board, rank: int) -> bool:
    failed = board.get(rank, fields.FAILED) and board.get(rank, fields.LEFT) >= fields.GONE
    return bool(failed or board.get(rank, fields.LOST))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
