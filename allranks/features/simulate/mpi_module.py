"""The module ``mpi4py.MPI`` of simulated ranks, and the functions that send and receive arrays."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from mpi4py import MPI

from allranks.collectives.arrays.libraries import ArrayHeader, to_dtype, to_numpy
from allranks.collectives.arrays.reductions import ReduceOp, check, name_of
from allranks.errors import UsageError
from allranks.features.simulate.comm import (
    SELF,
    WORLD,
    RankGroup,
    SimulatedCartcomm,
    SimulatedComm,
    SimulatedIntracomm,
)
from allranks.features.simulate.events import SimulatedMessage
from allranks.features.simulate.requests import (
    ON_REAL_RANKS,
    MatchedMessage,
    SimulatedRequest,
    running,
    running_world,
)

_TAGS, _HEAD_BYTES = 1 << 14, 256
_TICK_SECONDS = 1e-6
"""What a reading of the clock takes if computing takes no time."""
_REFUSED = ("Win", "File", "Intercomm", "Graphcomm", "Distgraphcomm", "Prequest", "Open_port")


class SimulatedMPI(types.ModuleType):
    """``mpi4py.MPI`` as a cell of simulated ranks imports it; the rest is mpi4py's own."""

    def __init__(self) -> None:
        super().__init__("mpi4py.MPI", MPI.__doc__)
        self.COMM_WORLD, self.COMM_SELF = WORLD, SELF
        self.Comm = SimulatedComm
        self.Intracomm = SimulatedIntracomm
        self.Cartcomm = SimulatedCartcomm
        self.Request, self.Group, self.Message = SimulatedRequest, RankGroup, MatchedMessage
        self.Wtime = read_clock
        self.Init = self.Finalize = lambda: None

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED:
            raise UsageError(
                f"expected what simulated ranks have of MPI, found MPI.{name}. {ON_REAL_RANKS}"
            )
        return getattr(MPI, name)


def wtime() -> float:
    """The simulated time of this rank, in seconds since its cell began."""
    scheduler = running()
    scheduler.computed()
    return scheduler.task.clock


def read_clock() -> float:
    """As `wtime`, but later than the reading before: programs divide by the difference."""
    scheduler = running()
    scheduler.computed(0.0 if scheduler.measures else _TICK_SECONDS)
    return scheduler.task.clock


def send(array: Any, dest: int, tag: int = 0, *, name: str | None = None) -> None:
    """As `allranks.collectives.send`."""
    _check_peer(dest, tag)
    source, _ = to_numpy(array)
    check(ReduceOp.Sum, source.dtype)
    head = ArrayHeader(name_of(source.dtype), source.shape).pack(_HEAD_BYTES)
    data = np.concatenate([head, source.reshape(-1).view(np.uint8)])
    WORLD._send("send", data, source.nbytes, dest, _TAGS + tag).Wait()


def recv(source: int, tag: int = 0, *, like: Any = None, name: str | None = None) -> Any:
    """As `allranks.collectives.recv`."""
    _check_peer(source, tag)

    def deliver(message: SimulatedMessage, status: MPI.Status) -> Any:
        head = ArrayHeader.unpack(message.data[:_HEAD_BYTES])
        return message.data[_HEAD_BYTES:].view(to_dtype(head.dtype)).reshape(head.shape)

    found = WORLD._receive("recv", deliver, source, _TAGS + tag).wait()
    return found if like is None else to_numpy(like)[1](found)


def _check_peer(peer: Any, tag: Any) -> None:
    world = running_world()
    if not (0 <= peer < world.size and peer != world.rank and 0 <= tag < _TAGS):
        raise UsageError(
            f"send and recv need another rank, from 0 to {world.size - 1}, and a tag below "
            f"{_TAGS}: found rank {peer!r:.60} (this is rank {world.rank}), tag {tag!r:.60}."
        )
