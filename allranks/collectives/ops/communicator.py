"""`comm`: an mpi4py communicator with interruptible waits, and the communicators made of it."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
from mpi4py import MPI

from allranks.collectives.calls.guard import Spec
from allranks.collectives.mpi.epochs import rebind
from allranks.collectives.ops import operations
from allranks.collectives.ops.mpi_collectives import Collectives, blocking
from allranks.collectives.ops.point_to_point import Raw, Request
from allranks.collectives.world import World, current
from allranks.collectives.world.process_sets import open_group, ranks_of
from allranks.collectives.world.world import ALONE
from allranks.errors import UsageError
from allranks.records.deferred import deferred

Made = TypeVar("Made", bound=MPI.Comm)
_OF_THE_WORLD = (
    MPI.TAG_UB, MPI.IO, MPI.WTIME_IS_GLOBAL, MPI.UNIVERSE_SIZE, MPI.APPNUM, MPI.LASTUSEDCODE
)  # fmt: skip
"""Attributes of MPI's communicator of all ranks that its duplicates lack."""
_WHOLE = MPI.COMM_WORLD
_TRANSPORTS = "OMPI_MCA_btl"


def _check_reach(op: str) -> None:
    """Raises `UsageError` if processes of another job cannot be reached."""
    # Open MPI does not reach them in shared memory, and would wait for ever.
    chosen = os.environ.get(_TRANSPORTS, "")
    if chosen and not chosen.startswith("^") and "tcp" not in chosen.split(","):
        raise UsageError(
            f"comm.{op} needs tcp to the processes that are not of these ranks: found "
            f"{_TRANSPORTS}={chosen}, by which no rank listens on a network. Set it before the "
            f"ranks start: %env {_TRANSPORTS}={chosen},tcp  and  %distributed restart"
        )


class Comm(Collectives):
    """MPI.Intracomm with the same methods, each of which polls a non-blocking call.

    Ctrl-C interrupts all of them; they raise `RankLeft` if a rank has left the cell. Communicators
    made of it are guarded too, and last until the epoch ends.
    """

    def Split(self, color: int = 0, key: int = 0) -> MPI.Comm:
        """MPI_Split: a communicator for each colour; the null communicator for UNDEFINED."""
        if color < 0 and color != MPI.UNDEFINED:
            raise UsageError(
                f"comm.Split needs a colour from 0 on, or MPI.UNDEFINED: found color={color}."
            )
        return self._made("Split", Raw.Split, color, key)

    def Idup(self, info: MPI.Info | None = None) -> tuple[Any, MPI.Request]:
        """MPI_Comm_idup; the communicator exists at once, and the request has completed."""
        return self.Dup(info), Request()

    def Idup_with_info(self, info: MPI.Info) -> tuple[Any, MPI.Request]:
        return self.Dup_with_info(info), Request()

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> MPI.Cartcomm:
        """MPI_Cart_create: a grid; the null communicator on ranks outside of it."""
        around = _extents(periods) if isinstance(periods, Sequence) else periods
        alike = (_extents(dims), around)
        return self._made("Create_cart", Raw.Create_cart, dims, periods, reorder, alike=alike)

    def Create_graph(
        self, index: Sequence[int], edges: Sequence[int], reorder: bool = False
    ) -> MPI.Graphcomm:
        alike = (_extents(index), _extents(edges))
        return self._made("Create_graph", Raw.Create_graph, index, edges, reorder, alike=alike)

    def Create_intercomm(
        self, local_leader: int, peer_comm: MPI.Intracomm, remote_leader: int, tag: int = 0
    ) -> MPI.Intercomm:
        """MPI_Intercomm_create, after the ranks of both sides have arrived."""
        self.agree("comm.Create_intercomm")
        if self.rank == local_leader and isinstance(peer_comm, Comm):
            # MPI itself sends with this tag between the two leaders.
            peer_comm.sendrecv(None, remote_leader, tag, None, remote_leader, tag)
        self.agree("comm.Create_intercomm")
        arguments = local_leader, peer_comm, remote_leader, tag
        return self._whole("Create_intercomm", *arguments)

    def Spawn(self, *arguments: Any, **options: Any) -> MPI.Intercomm:
        """MPI_Comm_spawn, after all ranks have arrived."""
        self.agree("comm.Spawn")
        _check_reach("Spawn")
        return self._whole("Spawn", *arguments, **options)

    def Spawn_multiple(self, *arguments: Any, **options: Any) -> MPI.Intercomm:
        self.agree("comm.Spawn_multiple")
        _check_reach("Spawn_multiple")
        return self._whole("Spawn_multiple", *arguments, **options)

    def _whole(self, op: str, *arguments: Any, **options: Any) -> MPI.Intercomm:
        """MPI's own call, which is certain to end; no interrupt is raised within."""
        with deferred():
            made: MPI.Intercomm = getattr(Raw, op)(self, *arguments, **options)
        return made

    def _made(
        self,
        op: str,
        make: Callable[..., Made],
        *arguments: Any,
        alike: tuple[Any, ...] = (),
        **options: Any,
    ) -> Made:
        """A guarded communicator that MPI makes of this one. ``alike``: values that must be the
        same on every rank.
        """
        world, parent = self._world, self._group()
        # After all have arrived, MPI's call is certain to end, so no interrupt is raised meanwhile.
        # A rank that never arrives leaves its cell, and then the others raise RankLeft.
        with deferred():
            every = world.run(
                operations.begin_object_gather(parent, f"comm.{op}", world.made, alike=alike)
            )
            world.made = max(every) + 1
            made = make(self, *arguments, **options)
            ranks = ranks_of(made, world)
            world.run(open_group(parent, Spec(f"comm.{op} group"), world, world.made, ranks))
        return cast("Made", guarded(made, world) if ranks else made)

    def Free(self) -> None:
        """MPI_Comm_free; a communicator of an earlier epoch is not freed."""
        if self._epoch is None:
            raise UsageError(
                "comm.Free() needs a communicator that the program has made: this one lasts as "
                "long as the ranks do."
            )
        self._world.close(self._number)
        if self.stale:
            rebind(self, MPI.COMM_NULL)
        else:
            super().Free()

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """MPI_Abort; in a notebook it ends this rank only, which can be replaced."""
        if self._world.notebook:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(errorcode & 255 or 1)
        super().Abort(errorcode)

    def free(self) -> None:
        """`Free`, if the communicator can be freed."""
        if self._epoch is not None and self != MPI.COMM_NULL:
            self.Free()

    def Disconnect(self) -> None:
        """MPI_Comm_disconnect: `Free`, after all ranks have arrived."""
        if self._epoch is not None and not self.stale:
            self.Barrier()
        self.Free()

    def Get_attr(self, keyval: int) -> Any:
        if self._epoch is None and keyval in _OF_THE_WORLD:
            return _WHOLE.Get_attr(keyval)
        return super().Get_attr(keyval)

    def __reduce__(self) -> Any:
        """A communicator of all ranks, or of one, is unpickled as that of the unpickling rank."""
        if self._epoch is not None:
            raise ValueError("a communicator that the program has made cannot be pickled")
        return _lasting, (self._number == ALONE,)


def making(kind: type[Comm], plain: type[MPI.Comm], name: str) -> None:
    """Guards the call of that name, which makes a communicator of another."""
    make = getattr(plain, name)
    signature = inspect.signature(make)

    @wraps(make)
    def made(self: Comm, *arguments: Any, **options: Any) -> Any:
        signature.bind(self, *arguments, **options)  # after the agreement no rank may fail alone
        return self._made(name, make, *arguments, **options)

    setattr(kind, name, made)


for _name in ("Split_type", "Dup", "Dup_with_info", "Clone", "Create"):
    making(Comm, Raw, _name)
for _name in ("Create_dist_graph", "Create_dist_graph_adjacent"):
    making(Comm, Raw, _name)

KINDS: dict[int, type[Comm]] = {MPI.UNDEFINED: Comm}
"""The class of a communicator, by its topology."""


def guarded(made: MPI.Comm, world: World) -> Comm:
    """The guarded form of a communicator whose group was made last."""
    fresh = KINDS[made.Get_topology()](made)
    fresh.bind(world, world.made, world.epoch)
    weakref.finalize(fresh, world.close, world.made)
    return fresh


def _lasting(alone: bool) -> Comm:
    communicators = current().mpi
    assert communicators is not None
    found: Comm = communicators.alone if alone else communicators.user
    return found


def _extents(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


_Raw = MPI.Topocomm


class Topocomm(Comm, MPI.Topocomm):
    """MPI.Topocomm, guarded."""

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        return self._exchange("neighbor_allgather", [sendobj] * self.outdegree)

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        values = list(sendobj)
        if len(values) != self.outdegree:
            raise UsageError(
                f"comm.neighbor_alltoall needs one object for each of this rank's {self.outdegree} "
                f"neighbours: found {len(values)}."
            )
        return self._exchange("neighbor_alltoall", values)

    def _exchange(self, op: str, values: list[Any]) -> list[Any]:
        """Exchanges sizes, then objects; None from a missing neighbour."""
        parts = [MPI.pickle.dumps(value) for value in values]
        lengths = np.array([len(part) for part in parts], np.int64)
        theirs = np.zeros(self.indegree, np.int64)
        self._collective(op, _Raw.Ineighbor_alltoall, lengths, theirs)
        data = np.empty(int(theirs.sum()), np.uint8)
        sent = (np.frombuffer(b"".join(parts), np.uint8), lengths.tolist())
        self._collective(op, _Raw.Ineighbor_alltoallv, sent, (data, theirs.tolist()))
        pieces = np.split(data, np.cumsum(theirs)[:-1]) if theirs.size else []
        return [MPI.pickle.loads(piece.tobytes()) if piece.size else None for piece in pieces]


for _form in ("allgather", "allgatherv", "alltoall", "alltoallv", "alltoallw"):
    setattr(Topocomm, f"Neighbor_{_form}", blocking(_Raw, f"Neighbor_{_form}"))


class Cartcomm(Topocomm, MPI.Cartcomm):
    """MPI.Cartcomm, guarded."""


making(Cartcomm, MPI.Cartcomm, "Sub")


class Graphcomm(Topocomm, MPI.Graphcomm):
    """MPI.Graphcomm, guarded."""


class Distgraphcomm(Topocomm, MPI.Distgraphcomm):
    """MPI.Distgraphcomm, guarded."""


TOPOLOGIES = {MPI.CART: Cartcomm, MPI.GRAPH: Graphcomm, MPI.DIST_GRAPH: Distgraphcomm}
