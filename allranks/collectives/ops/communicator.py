"""An mpi4py communicator whose every wait can be left."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from allranks.collectives.calls.guard import Spec
from allranks.collectives.calls.wait import Steps
from allranks.collectives.mpi.transport import complete
from allranks.collectives.ops import objects
from allranks.collectives.ops.point_to_point import PointToPoint
from allranks.collectives.world import World
from allranks.collectives.world.process_sets import open_group
from allranks.errors import UsageError
from allranks.records.deferred import deferred


class Comm(PointToPoint):
    """MPI.Intracomm with the same methods, each of which polls a non-blocking call.

    Ctrl-C is heard in all of them; a rank that has left the cell makes them raise `RankLeft`; a
    collective that not every rank calls, or with another root, makes them raise
    `CollectiveMismatch` before any data moves. Buffers are not compared: mpi4py allows them to
    differ.
    """

    def _collective(
        self, op: str, post: Callable[..., MPI.Request], *arguments: Any, root: int | None = None
    ) -> None:
        group = self._group()
        whom = -1 if root is None else group.ranks[self._rooted(op, root)]
        call = group.call(Spec(f"comm.{op}", root=whom), op)
        call.transport = "mpi"

        def steps() -> Steps[None]:
            yield from call.agreed()
            yield from complete(self._world.kept, call, post, *arguments)

        call.steps = steps()
        self._world.run(call)

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """MPI_Split: a communicator of the same kind for each colour.

        It lasts as long as the epoch does. The null communicator where the colour is UNDEFINED.
        """
        return self._divide("Split", color, key)

    def Dup(self, info: MPI.Info | None = None) -> Comm:
        """MPI_Comm_dup: the same kind and the same ranks, until the epoch ends."""
        return self._divide("Dup", 0, self.Get_rank())

    def Clone(self) -> Comm:
        """The same as `Dup`."""
        return self.Dup()

    def _divide(self, op: str, color: int, key: int) -> Comm:
        world, parent = self._world, self._group()
        # Once all have come, MPI's call is certain to end; nobody may leave in between. A rank
        # that never comes leaves its cell, and then the others raise RankLeft.
        with deferred():
            every = self._world.run(objects.gather(parent, f"comm.{op}", (color, key, world.made)))
            world.made = max(made for _, _, made in every) + 1
            chosen = sorted((k, i) for i, (other, k, _) in enumerate(every) if other == color)
            ranks = tuple(parent.ranks[i] for _, i in chosen) if color >= 0 else ()
            call = parent.call(Spec(f"comm.{op} group"), op)
            call.steps = open_group(world, parent, call, world.made, ranks)
            world.run(call)
            fresh = Comm(MPI.Intracomm.Split(self, color, key))
        if ranks:
            fresh.bind(world, world.made, world.epoch)
            weakref.finalize(fresh, _forget, world, world.made)
        return fresh

    def Barrier(self) -> None:
        """MPI_Barrier."""
        self._collective("Barrier", self.Ibarrier)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """MPI_Bcast."""
        self._collective("Bcast", self.Ibcast, buf, root, root=root)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """MPI_Allreduce."""
        self._collective("Allreduce", self.Iallreduce, sendbuf, recvbuf, op)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        """MPI_Reduce."""
        self._collective("Reduce", self.Ireduce, sendbuf, recvbuf, op, root, root=root)

    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM
    ) -> None:
        """MPI_Reduce_scatter."""
        self._collective("Reduce_scatter", self.Ireduce_scatter, sendbuf, recvbuf, recvcounts, op)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """MPI_Reduce_scatter_block."""
        self._collective("Reduce_scatter_block", self.Ireduce_scatter_block, sendbuf, recvbuf, op)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """MPI_Allgather."""
        self._collective("Allgather", self.Iallgather, sendbuf, recvbuf)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """MPI_Allgatherv."""
        self._collective("Allgatherv", self.Iallgatherv, sendbuf, recvbuf)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """MPI_Gather."""
        self._collective("Gather", self.Igather, sendbuf, recvbuf, root, root=root)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """MPI_Gatherv."""
        self._collective("Gatherv", self.Igatherv, sendbuf, recvbuf, root, root=root)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """MPI_Scatter."""
        self._collective("Scatter", self.Iscatter, sendbuf, recvbuf, root, root=root)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """MPI_Scatterv."""
        self._collective("Scatterv", self.Iscatterv, sendbuf, recvbuf, root, root=root)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """MPI_Alltoall."""
        self._collective("Alltoall", self.Ialltoall, sendbuf, recvbuf)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """MPI_Alltoallv."""
        self._collective("Alltoallv", self.Ialltoallv, sendbuf, recvbuf)

    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """MPI_Alltoallw."""
        self._collective("Alltoallw", self.Ialltoallw, sendbuf, recvbuf)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """MPI_Scan."""
        self._collective("Scan", self.Iscan, sendbuf, recvbuf, op)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """MPI_Exscan."""
        self._collective("Exscan", self.Iexscan, sendbuf, recvbuf, op)

    def barrier(self) -> None:
        """MPI_Barrier."""
        self.Barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Broadcasts a picklable object."""
        index = self._rooted("bcast", root)
        return self._world.run(objects.broadcast(self._group(), "comm.bcast", obj, "bcast", index))

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Gathers picklable objects on the root."""
        return self._objects("gather", sendobj, root)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Gathers picklable objects on every rank."""
        return self._objects("allgather", sendobj) or []

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """Scatters a sequence of picklable objects from the root."""
        values = list(sendobj) if self.Get_rank() == self._rooted("scatter", root) else []
        self._as_many(values if self.Get_rank() == root else None, "scatter")
        call = objects.alltoall(self._group(), "comm.scatter", values, "scatter", root)
        return self._world.run(call)[root]

    def alltoall(self, sendobj: Any) -> list[Any]:
        """Exchanges picklable objects, one for each rank."""
        values = list(sendobj)
        self._as_many(values, "alltoall")
        result: list[Any] = self._world.run(
            objects.alltoall(self._group(), "comm.alltoall", values, "alltoall")
        )
        return result

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        """Reduces picklable objects to the root, in the order of the ranks."""
        values = self._objects("reduce", sendobj, root)
        return None if values is None else _fold(values, op)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Reduces picklable objects to every rank, in the order of the ranks."""
        return _fold(self._objects("allreduce", sendobj) or [], op)

    def scan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Reduces the objects of the ranks up to this one."""
        return _fold((self._objects("scan", sendobj) or [])[: self.Get_rank() + 1], op)

    def exscan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Reduces the objects of the ranks before this one; None on the first."""
        before = (self._objects("exscan", sendobj) or [])[: self.Get_rank()]
        return _fold(before, op) if before else None

    def _rooted(self, op: str, root: int) -> int:
        """The root, which is one of this communicator's ranks."""
        last = self._group().size - 1
        if not 0 <= root <= last:
            raise UsageError(
                f"comm.{op} needs a root from 0 to {last}: found root={root}. Name one of them."
            )
        return root

    def _objects(self, op: str, value: Any, root: int | None = None) -> list[Any] | None:
        index = -1 if root is None else self._rooted(op, root)
        call = objects.gather(self._group(), f"comm.{op}", value, op, index)
        result: list[Any] | None = self._world.run(call)
        return result

    def _as_many(self, values: list[Any] | None, op: str) -> None:
        if values is not None and len(values) != self.Get_size():
            raise ValueError(
                f"{op} needs one object a rank: expected {self.Get_size()}, found {len(values)}."
            )


def _forget(world: World, number: int) -> None:
    gone = world.groups.pop(number, None)
    if gone is not None:
        gone.abandon()


def _fold(values: list[Any], op: Any) -> Any:
    total = values[0]
    for value in values[1:]:
        total = op(total, value)
    return total
