"""An mpi4py communicator whose every wait can be left, and the communicators made of it."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

from mpi4py import MPI

from allranks.collectives.calls.guard import Spec
from allranks.collectives.mpi.epochs import rebind
from allranks.collectives.ops import objects
from allranks.collectives.ops.mpi_collectives import Collectives
from allranks.collectives.ops.point_to_point import Raw
from allranks.collectives.ops.requests import Request
from allranks.collectives.world import World, current
from allranks.collectives.world.process_sets import open_group, ranks_of
from allranks.collectives.world.world import ALONE
from allranks.errors import UsageError
from allranks.records.deferred import deferred

Made = TypeVar("Made", bound=MPI.Comm)
_OF_THE_WORLD = (
    MPI.TAG_UB, MPI.IO, MPI.WTIME_IS_GLOBAL, MPI.UNIVERSE_SIZE, MPI.APPNUM, MPI.LASTUSEDCODE
)  # fmt: skip
"""Attributes that only MPI's own communicator of all ranks has, and its duplicates have not."""
_WHOLE = MPI.COMM_WORLD
_TRANSPORTS = "OMPI_MCA_btl"


def _check_reach(op: str) -> None:
    """Checks that processes of another job can be reached, for which Open MPI would wait for ever.

    It does not reach them in shared memory.

    Raises:
        UsageError: they cannot.
    """
    chosen = os.environ.get(_TRANSPORTS, "")
    if chosen and not chosen.startswith("^") and "tcp" not in chosen.split(","):
        raise UsageError(
            f"comm.{op} needs tcp to the processes that are not of these ranks: found "
            f"{_TRANSPORTS}={chosen}, by which no rank listens on a network. Set it before the "
            f"ranks start: %env {_TRANSPORTS}={chosen},tcp  and  %distributed restart"
        )


class Comm(Collectives):
    """MPI.Intracomm with the same methods, each of which polls a non-blocking call.

    Ctrl-C is heard in all of them; a rank that has left the cell makes them raise `RankLeft`. What
    is made of it is guarded as well, and lasts as long as the epoch does.
    """

    def Split(self, color: int = 0, key: int = 0) -> MPI.Comm:
        """MPI_Split: one for each colour; the null communicator where that is UNDEFINED."""
        if color < 0 and color != MPI.UNDEFINED:
            raise UsageError(
                f"comm.Split needs a colour from 0 on, or MPI.UNDEFINED: found color={color}."
            )
        return self._made("Split", Raw.Split, color, key)

    def Idup(self, info: MPI.Info | None = None) -> tuple[Any, MPI.Request]:
        """MPI_Comm_idup: it is there at once, and the request has completed."""
        return self.Dup(info), Request()

    def Idup_with_info(self, info: MPI.Info) -> tuple[Any, MPI.Request]:
        """MPI_Comm_idup_with_info, as `Idup`."""
        return self.Dup_with_info(info), Request()

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> MPI.Cartcomm:
        """MPI_Cart_create: a grid; the null communicator on ranks that it has no place for."""
        around = _extents(periods) if isinstance(periods, Sequence) else periods
        alike = (_extents(dims), around)
        return self._made("Create_cart", Raw.Create_cart, dims, periods, reorder, alike=alike)

    def Create_graph(
        self, index: Sequence[int], edges: Sequence[int], reorder: bool = False
    ) -> MPI.Graphcomm:
        """MPI_Graph_create."""
        alike = (_extents(index), _extents(edges))
        return self._made("Create_graph", Raw.Create_graph, index, edges, reorder, alike=alike)

    def Create_intercomm(
        self, local_leader: int, peer_comm: MPI.Intracomm, remote_leader: int, tag: int = 0
    ) -> MPI.Intercomm:
        """MPI_Intercomm_create, once the ranks of both sides have come."""
        self.agree("comm.Create_intercomm")
        if self.rank == local_leader and isinstance(peer_comm, Comm):
            # MPI itself sends with this tag between the two leaders.
            peer_comm.sendrecv(None, remote_leader, tag, None, remote_leader, tag)
        self.agree("comm.Create_intercomm")
        arguments = local_leader, peer_comm, remote_leader, tag
        return self._whole("Create_intercomm", *arguments)

    def Spawn(self, *arguments: Any, **options: Any) -> MPI.Intercomm:
        """MPI_Comm_spawn, once all ranks have come."""
        self.agree("comm.Spawn")
        _check_reach("Spawn")
        return self._whole("Spawn", *arguments, **options)

    def Spawn_multiple(self, *arguments: Any, **options: Any) -> MPI.Intercomm:
        """MPI_Comm_spawn_multiple, once all ranks have come."""
        self.agree("comm.Spawn_multiple")
        _check_reach("Spawn_multiple")
        return self._whole("Spawn_multiple", *arguments, **options)

    def _whole(self, op: str, *arguments: Any, **options: Any) -> MPI.Intercomm:
        """MPI's own call, which is certain to end: nobody leaves in between."""
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
        """What MPI makes of this communicator, guarded.

        ``alike``: what must be the same on every rank.
        """
        world, parent = self._world, self._group()
        # Once all have come, MPI's call is certain to end; nobody may leave in between. A rank
        # that never comes leaves its cell, and then the others raise RankLeft.
        with deferred():
            every = world.run(objects.gather(parent, f"comm.{op}", world.made, alike=alike))
            world.made = max(every) + 1
            made = make(self, *arguments, **options)
            ranks = ranks_of(made, world)
            world.run(open_group(parent, Spec(f"comm.{op} group"), world, world.made, ranks))
        return cast("Made", guarded(made, world) if ranks else made)

    def Free(self) -> None:
        """MPI_Comm_free, of one that was made in this epoch; one of an earlier epoch is kept."""
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
        """MPI_Abort; in a notebook it ends this rank alone, which can be replaced then."""
        if self._world.notebook:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(errorcode & 255 or 1)
        super().Abort(errorcode)

    def free(self) -> None:
        """`Free`, where there is something to free."""
        if self._epoch is not None and self != MPI.COMM_NULL:
            self.Free()

    def Disconnect(self) -> None:
        """MPI_Comm_disconnect: `Free`, once all ranks have come."""
        if self._epoch is not None and not self.stale:
            self.Barrier()
        self.Free()

    def Get_attr(self, keyval: int) -> Any:
        """MPI_Comm_get_attr."""
        if self._epoch is None and keyval in _OF_THE_WORLD:
            return _WHOLE.Get_attr(keyval)
        return super().Get_attr(keyval)

    def __reduce__(self) -> Any:
        """The communicator of all ranks is that of the rank that unpickles it; so is its own."""
        if self._epoch is not None:
            raise ValueError("a communicator that the program has made cannot be pickled")
        return _lasting, (self._number == ALONE,)


def making(kind: type[Comm], plain: type[MPI.Comm], name: str) -> None:
    """Guards the call of that name, which makes one communicator of another."""
    make = getattr(plain, name)
    signature = inspect.signature(make)

    @wraps(make)
    def made(self: Comm, *arguments: Any, **options: Any) -> Any:
        signature.bind(self, *arguments, **options)  # once all have come, none may fail alone
        return self._made(name, make, *arguments, **options)

    setattr(kind, name, made)


for _name in ("Split_type", "Dup", "Dup_with_info", "Clone", "Create"):
    making(Comm, Raw, _name)
for _name in ("Create_dist_graph", "Create_dist_graph_adjacent"):
    making(Comm, Raw, _name)

KINDS: dict[int, type[Comm]] = {MPI.UNDEFINED: Comm}
"""The class of a communicator, by its topology."""


def guarded(made: MPI.Comm, world: World) -> Comm:
    """The guarded communicator for one of MPI's, whose group is the last that was made."""
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
