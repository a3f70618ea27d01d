"""How a rank ends: the other ranks learn of it, and none hangs in MPI_Finalize."""

from __future__ import annotations

import atexit
import faulthandler
import inspect
import os
import sys
from pathlib import Path
from types import TracebackType

from allranks.collectives.calls import board as fields
from allranks.collectives.calls.callsite import of_traceback
from allranks.collectives.calls.peers import State
from allranks.collectives.calls.wait import Pause
from allranks.collectives.host import memory
from allranks.collectives.world import World

_AFTER_FAILURE_SECONDS = 10.0
_NOTEBOOK_SECONDS = 2.0
_FINALIZE_SECONDS = 5.0
_FINALIZE_SCRIPT_SECONDS = 30.0
"""Longer under mpiexec, which reports a failed job if a rank ends without MPI_Finalize."""
_installed: list[World] = []


def install(world: World) -> None:
    """Makes the process the scope: its end, by an exception or not, leaves the scope."""
    _installed.append(world)
    if len(_installed) > 1:
        return
    hook = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        where = str(of_traceback(tb))
        _installed[-1].depart(f"raised {kind.__name__}: {error}", True, where)
        hook(kind, error, tb)

    sys.excepthook = failed
    atexit.register(finish)


def finish() -> None:
    """Finalizes MPI if the other ranks can take part; otherwise ends the process without it."""
    world = _installed[-1]
    from mpi4py import MPI

    if MPI.Is_finalized() or world.mpi is None:
        return
    world.depart("it ended", False, "")
    code = 1 if world.failed else 0
    if not _wait_for_all(world):
        _flush()
        if world.notebook:
            os._exit(code)
        MPI.COMM_WORLD.Abort(code or 1)
    # Only after the barrier: data that this rank has sent may still be on its way.
    for group in list(world.groups.values()):
        group.abandon()
    if world.gpu is not None:
        world.gpu.end()
        world.gpu.aborts.wait(_FINALIZE_SECONDS)
    _flush()
    patience = _FINALIZE_SECONDS if world.notebook else _FINALIZE_SCRIPT_SECONDS
    # Not a thread of Python's: MPI.Finalize lets none run until it returns, and from Python 3.12 on
    # none can be started now. faulthandler prints where the rank was, and ends it with code 1:
    # mpiexec reports a failed job if a rank ends without MPI_Finalize, whatever its code.
    faulthandler.dump_traceback_later(patience, exit=True, file=2)
    left = memory.of_open_mpi() if MPI.COMM_WORLD.Get_size() == 1 else []
    inspect.unwrap(MPI.Finalize)()  # without the guard of `guard_mpi4py`
    for path in left:
        Path(path).unlink(missing_ok=True)
    faulthandler.cancel_dump_traceback_later()


def _wait_for_all(world: World) -> bool:
    """Waits for the other ranks to end: without limit while they work, briefly after a failure."""
    assert world.mpi is not None
    request = world.mpi.pristine.Ibarrier()
    pause = Pause()
    while not request.Test():
        waited = pause()
        if world.notebook and waited > _NOTEBOOK_SECONDS:
            return False
        states = map(world.peers.state, range(world.size))
        if waited > _AFTER_FAILURE_SECONDS and (world.failed or any(map(_will_not_end, states))):
            return False
    return True


def _will_not_end(state: State) -> bool:
    """Whether a rank has failed for good, or its host cannot be reached."""
    return bool(state.lost) or (state.failed and state.left >= fields.GONE)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
