"""`comm`: an mpi4py communicator whose waits can be interrupted, the communicators made of it, and
MPI.Win and MPI.File.

MPI has no non-blocking form of most calls for windows and files, nor of those that make a
communicator, so all ranks agree first: then MPI's call is certain to end. Calls that concern one
rank, as `Win.Lock`, are MPI's own and cannot be interrupted.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import reduce, wraps
from traceback import format_exception_only
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
from mpi4py import MPI

from allranks.collectives.calls.call import Call, Steps, nbytes_of
from allranks.collectives.calls.specs import Spec
from allranks.collectives.mpi.transport import complete, rebind
from allranks.collectives.ops import grids, operations
from allranks.collectives.ops.bounds import behind_end, mistake
from allranks.collectives.ops.buffers import (
    compared,
    name_of_op,
    with_copy,
    with_in_place,
    with_wrapping_sum,
)
from allranks.collectives.ops.point_to_point import (
    PREPARING,
    REFUSED_ARGUMENTS,
    Op,
    PointToPoint,
    Raw,
    RefusedByMpi,
    Request,
    StandIn,
    raised,
    returning,
)
from allranks.collectives.world import World, current
from allranks.collectives.world.process_sets import open_group, ranks_of
from allranks.collectives.world.world import ALONE
from allranks.errors import RankLeft, UsageError
from allranks.records.deferred import deferred

Made = TypeVar("Made", bound=MPI.Comm)
_OF_THE_WORLD = (
    MPI.TAG_UB, MPI.IO, MPI.WTIME_IS_GLOBAL, MPI.UNIVERSE_SIZE, MPI.APPNUM, MPI.LASTUSEDCODE
)  # fmt: skip
"""Attributes of MPI's communicator of all ranks that its duplicates lack."""
_WHOLE = MPI.COMM_WORLD
_TRANSPORTS = "OMPI_MCA_btl"


class WrongRoot(RefusedByMpi):
    """A root that is not a rank."""

    code = MPI.ERR_ROOT


class WrongColor(RefusedByMpi):
    """A negative colour of `Comm.Split`."""

    code = MPI.ERR_ARG


class CannotFree(RefusedByMpi):
    """`Comm.Free` of a communicator that the program has not made."""

    code = MPI.ERR_COMM


class Comm(PointToPoint):
    """MPI.Intracomm with the same methods, each of which polls a non-blocking call.

    Ctrl-C interrupts all of them; they raise `RankLeft` if a rank has left the cell. A collective
    that not all ranks call, or with another root, op or number of bytes, raises
    `CollectiveMismatch` before data moves. Communicators made of it are guarded too, and last until
    the epoch ends.
    """

    def _collective(
        self, op: str, post: Callable[..., MPI.Request], *arguments: Any, root: int | None = None
    ) -> None:
        group = self._used()
        arguments = with_in_place(op, arguments, root in (None, self.Get_rank()))
        spec = self._spec(op, op, arguments, root)
        if arguments and (op != "Bcast" or root == self.Get_rank()):
            self._hint_at_mask(op, arguments[0])
        moved = with_copy(op, with_wrapping_sum(op, arguments))

        def steps(call: Call) -> Steps[None]:
            yield from self._compared(call)
            try:
                yield from complete(self._world.held_requests, call, post, self, *moved)
            except REFUSED_ARGUMENTS:
                self._world.refuse(call)
                raise

        nbytes = max(map(nbytes_of, arguments), default=0)
        self._world.run(group.call(spec, op, nbytes, steps))
        if any(type(argument) is Op for argument in arguments):
            self._check_function(op)

    def _spec(self, name: str, op: str, arguments: tuple[Any, ...], root: int | None) -> Spec:
        """What the call of that name brings for the operation ``op``."""
        group, me = self._group(), self.Get_rank()
        whom = -1 if root is None else group.ranks[self._rooted(name, root)]
        uses_both = root in (None, me)
        alike = compared(op, arguments, uses_both, group.size)
        # At the edge of a grid a rank lacks neighbours, and MPI skips their parts.
        grid = self if op.startswith("Neighbor") and isinstance(self, MPI.Cartcomm) else None
        everybody = grid is None or all(grid.periods)
        degrees = None
        if op.startswith("Neighbor") and isinstance(self, MPI.Topocomm):
            degrees = self.outdegree, self.indegree
        if uses_both:
            wrong = mistake(op, arguments, me, group.size, moves_all=everybody, degrees=degrees)
        else:
            wrong = behind_end(arguments[op.startswith("Scatter")])
        return Spec(f"comm.{name}", root=whom, refused=group.refused, mistake=wrong, **alike)

    def _compared(self, call: Call) -> Steps[None]:
        yield from self._agreed(call)
        if "+" in call.spec.dtype:  # on every rank
            found = " and ".join(call.spec.dtype.split("+"))
            raise UsageError(
                f"{call.spec.title} needs buffers of one type: found {found}, and MPI converts "
                "none. Convert one with astype()."
            )
        if "+" in call.spec.order:
            raise UsageError(
                f"{call.spec.title} needs buffers of one order in memory: found C order and "
                "Fortran's, as a transposed array has it, and MPI moves memory as it lies. Send "
                "np.ascontiguousarray(x), and receive into an array in C order."
            )
        if call.spec.mistake:
            raise UsageError(f"{call.spec.title} needs {call.spec.mistake}.")

    def _check_function(self, op: str) -> None:
        """Raises on every rank if the function of an op has raised on one."""
        error = raised()
        told = "" if error is None else "".join(format_exception_only(error)).strip()
        every = self._world.run(
            operations.begin_object_gather(self._group(), f"comm.{op} op", told)
        )
        if error is not None:
            raise error
        for rank, text in zip(self._group().ranks, every, strict=True):
            if text:
                raise RankLeft(
                    f"comm.{op} needs an op that returns: on rank {rank} it raised {text}. "
                    "The result is not valid."
                )

    def agree(self, title: str, alike: tuple[Any, ...] = ()) -> None:
        """Ends when all ranks have arrived at the same call of a window or a file, with the same
        values ``alike``.
        """
        group = self._used()
        spec = Spec(title, shape=alike, refused=group.refused)
        self._world.run(group.call(spec, title, steps=self._agreed))

    def _agreed(self, call: Call) -> Steps[None]:
        call.transport = "mpi"
        for awaited in call.agreed():
            # MPI progresses only within its calls, and late ranks may need that.
            Raw.Iprobe(self)
            yield awaited

    def Barrier(self) -> None:
        self._collective("Barrier", Raw.Ibarrier)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        self._collective("Bcast", Raw.Ibcast, buf, root, root=root)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        self._collective("Reduce", Raw.Ireduce, sendbuf, recvbuf, op, root, root=root)

    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM
    ) -> None:
        self._collective("Reduce_scatter", Raw.Ireduce_scatter, sendbuf, recvbuf, recvcounts, op)

    barrier = Barrier

    def bcast(self, obj: Any, root: int = 0) -> Any:
        index = self._rooted("bcast", root)
        return self._world.run(
            operations.begin_object_broadcast(self._group(), "comm.bcast", obj, "bcast", index)
        )

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        found: list[Any] | None = self._objects("gather", sendobj, root)
        return found

    def allgather(self, sendobj: Any) -> list[Any]:
        found: list[Any] = self._objects("allgather", sendobj)
        return found

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        index = self._rooted("scatter", root)
        values = self._one_a_rank("scatter", sendobj) if self.Get_rank() == index else []
        call = operations.begin_object_alltoall(
            self._group(), "comm.scatter", values, "scatter", index
        )
        return self._world.run(call)[index]

    def alltoall(self, sendobj: Any) -> list[Any]:
        values = self._one_a_rank("alltoall", sendobj)
        result: list[Any] = self._world.run(
            operations.begin_object_alltoall(self._group(), "comm.alltoall", values, "alltoall")
        )
        return result

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        """Reduces picklable objects to the root, in the order of the ranks."""
        values = self._objects("reduce", sendobj, root, op)
        return None if values is None else reduce(op, values)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Reduces picklable objects to every rank, in the order of the ranks."""
        return reduce(op, self._objects("allreduce", sendobj, op=op))

    def scan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Reduces the objects of the ranks up to this one."""
        return reduce(op, self._objects("scan", sendobj, op=op)[: self.Get_rank() + 1])

    def exscan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Reduces the objects of the ranks before this one; None on the first rank."""
        before = self._objects("exscan", sendobj, op=op)[: self.Get_rank()]
        return reduce(op, before) if before else None

    def _rooted(self, op: str, root: int) -> int:
        last = self._group().size - 1
        if not 0 <= root <= last:
            raise WrongRoot(
                f"comm.{op} needs a root from 0 to {last}: found root={root}. Name one of them."
            )
        return int(root)  # mpi4py takes a float, as that of size / 2

    def _objects(self, call: str, value: Any, root: int | None = None, op: Any = None) -> Any:
        index = -1 if root is None else self._rooted(call, root)
        reduction = "" if op is None else name_of_op(op)
        return self._world.run(
            operations.begin_object_gather(
                self._group(), f"comm.{call}", value, call, index, reduction=reduction
            )
        )

    def _one_a_rank(self, op: str, objects: Any) -> list[Any]:
        values = list(objects)
        if len(values) != self.Get_size():
            raise ValueError(
                f"{op} needs one object a rank: expected {self.Get_size()}, found {len(values)}."
            )
        return values

    def Split(self, color: int = 0, key: int = 0) -> MPI.Comm:
        """MPI_Split: a communicator for each colour; the null communicator for UNDEFINED."""
        if color < 0 and color != MPI.UNDEFINED:
            raise WrongColor(
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
        arguments = local_leader, peer_comm, remote_leader, tag
        _check(_NULL, Raw.Create_intercomm, *arguments)
        self.agree("comm.Create_intercomm")
        if self.rank == local_leader and isinstance(peer_comm, Comm):
            # MPI itself sends with this tag between the two leaders.
            peer_comm.sendrecv(None, remote_leader, tag, None, remote_leader, tag)
        # Now both leaders have met, so MPI's call is certain to end on all ranks.
        self.agree("comm.Create_intercomm")
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
        _check(_NULL, make, *arguments, **options)
        if any(isinstance(one, MPI.Group) and one == MPI.GROUP_NULL for one in arguments):
            raise MPI.Exception(MPI.ERR_GROUP)
        # After all have arrived, MPI's call is certain to end, so no interrupt is raised meanwhile.
        # A rank that never arrives leaves its cell, and then the others raise RankLeft.
        with deferred():
            every = world.run(
                operations.begin_object_gather(
                    parent, f"comm.{op}", world.made, alike=alike, refused=parent.refused
                )
            )
            # The same number on all members, and of no other group of any of them.
            world.made = max(every) + 1
            made = self._created(make, *arguments, **options)
            ranks = ranks_of(made, world)
            world.run(open_group(parent, Spec(f"comm.{op} group"), world, world.made, ranks))
        return cast("Made", guarded(made, world) if ranks else made)

    def _created(self, make: Callable[..., Made], *arguments: Any, **options: Any) -> Made:
        epochs = self._world.mpi
        assert epochs is not None
        try:
            # In a script, no notebook reports a death.
            shield = epochs.creation.of(self, self._group().ranks)
            with shield if self._world.notebook else nullcontext():
                return make(self, *arguments, **options)
        except MPI.Exception as error:
            if (lost := epochs.lost_by(error)) is not None:
                raise lost from None
            raise

    def Free(self) -> None:
        """MPI_Comm_free; a communicator of an earlier epoch is not freed."""
        if self._epoch is None:
            raise CannotFree(
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
            # The status of a process has eight bits, and 0 would be no error.
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


_NULL = MPI.Cartcomm()
"""The null communicator, as an object of a class that has all methods."""


def _check(null: Any, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Raises the exception of mpi4py if it refuses the arguments of a method.

    After the agreement no rank may fail alone: the others would wait in MPI.
    """
    with suppress(MPI.Exception):  # of MPI, which refuses the null object and does nothing
        call(null, *arguments, **options)


def check_pools(core: Any) -> None:
    """Has the futures of `MPIPoolExecutor` end if its processes cannot be had. It calls Spawn, or
    Connect for a ``service``, in a thread, whose exception nothing would raise: its futures would
    never end. ``core`` is mpi4py.futures._core.
    """
    if hasattr(core.SpawnPool, "__wrapped__"):
        return
    for name, op in (("SpawnPool", "Spawn"), ("ServicePool", "Connect")):
        setattr(core, name, _checked_pool(getattr(core, name), op))
    for name in ("_manager_spawn", "_manager_service"):
        setattr(core, name, _breaking_pool(getattr(core, name)))


def _checked_pool(plain: Callable[[Any], Any], op: str) -> Callable[[Any], Any]:
    @wraps(plain)
    def checked(executor: Any) -> Any:
        _check_reach(op, ", or use the ranks as they are: MPICommExecutor(comm, 0)")
        return plain(executor)

    return checked


def _breaking_pool(plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @wraps(plain)
    def manage(pool: Any, options: Any) -> None:
        try:
            plain(pool, options)
        except Exception as error:
            pool.broken("".join(format_exception_only(error)).strip())

    return manage


def _check_reach(op: str, instead: str = "") -> None:
    """Raises `UsageError` if processes of another job cannot be reached."""
    # Open MPI does not reach them in shared memory, and would wait for ever.
    chosen = os.environ.get(_TRANSPORTS, "")
    if chosen and not chosen.startswith("^") and "tcp" not in chosen.split(","):
        raise UsageError(
            f"comm.{op} needs tcp to reach processes outside this cluster: found "
            f"{_TRANSPORTS}={chosen}, with which no rank listens on a network. Set it before the "
            f"ranks start: %env {_TRANSPORTS}={chosen},tcp  and  %distributed restart{instead}"
        )


def blocking(kind: type[MPI.Comm], name: str, last: str = "") -> Callable[..., None]:
    """Guards the call of that name: two buffers and, as ``last``, an op or a root."""
    post = getattr(kind, f"I{name.lower()}")

    def plain(self: Comm, sendbuf: Any, recvbuf: Any) -> None:
        self._collective(name, post, sendbuf, recvbuf)

    def reducing(self: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        self._collective(name, post, sendbuf, recvbuf, op)

    def rooted(self: Comm, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        self._collective(name, post, sendbuf, recvbuf, root, root=root)

    forms: dict[str, Callable[..., None]] = {"": plain, "op": reducing, "root": rooted}
    return wraps(getattr(kind, name))(forms[last])


_BLOCKING = {
    **dict.fromkeys(("Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Alltoallw"), ""),
    **dict.fromkeys(("Allreduce", "Reduce_scatter_block", "Scan", "Exscan"), "op"),
    **dict.fromkeys(("Gather", "Gatherv", "Scatter", "Scatterv"), "root"),
}
for _name, _last in _BLOCKING.items():
    setattr(Comm, _name, blocking(Raw, _name, _last))


def preparing(name: str) -> Callable[..., MPI.Prequest]:
    """Guards the call of that name, which makes a persistent request for a collective."""
    make = getattr(PointToPoint, name)
    signature = inspect.signature(getattr(Raw, name))
    op = name.removesuffix("_init")

    @wraps(make)
    def prepare(self: Comm, *arguments: Any, **options: Any) -> MPI.Prequest:
        given = signature.bind(self, *arguments, **options)
        given.apply_defaults()
        _, *brought, info = given.args
        root = given.arguments.get("root")
        values = with_in_place(op, tuple(brought), root in (None, self.Get_rank()))
        # MPI lets this call wait for the other ranks. The starts of the request do not.
        spec = self._spec(name, op, values, root)
        self._world.run(self._used().call(spec, name, steps=self._compared))
        made: MPI.Prequest = make(self, *with_wrapping_sum(op, values), info)
        return made

    return prepare


for _name in PREPARING:
    setattr(Comm, _name, preparing(_name))


def making(kind: type[Comm], plain: type[MPI.Comm], name: str) -> None:
    """Guards the call of that name, which makes a communicator of another."""
    make = getattr(plain, name)
    signature = inspect.signature(make)

    @wraps(make)
    def made(self: Comm, *arguments: Any, **options: Any) -> Any:
        signature.bind(self, *arguments, **options)  # after the agreement no rank may fail alone
        return self._made(name, make, *arguments, **options)

    setattr(kind, name, made)


for _name in (
    *("Split_type", "Dup", "Dup_with_info", "Clone", "Create"),
    *("Create_dist_graph", "Create_dist_graph_adjacent"),
):
    making(Comm, Raw, _name)


def guarded(made: MPI.Comm, world: World) -> Comm:
    """The guarded form of a communicator whose group was made last."""
    fresh = _KINDS[made.Get_topology()](made)
    fresh.bind(world, world.made, world.epoch)
    # A program may drop a communicator without Free(): its group has memory and transports.
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
        # Not alltoall: on a rank that only receives, mpi4py infers the count 0 of what is sent, and
        # Open MPI refuses a count that differs from that of the other buffer.
        one_each = (lengths, [1] * lengths.size), (theirs, [1] * theirs.size)
        self._collective(op, type(self).Ineighbor_alltoallv, *one_each)
        data = np.empty(int(theirs.sum()), np.uint8)
        sent = (np.frombuffer(b"".join(parts), np.uint8), lengths.tolist())
        self._collective(op, type(self).Ineighbor_alltoallv, sent, (data, theirs.tolist()))
        pieces = np.split(data, np.cumsum(theirs)[:-1]) if theirs.size else []
        return [MPI.pickle.loads(piece.tobytes()) if piece.size else None for piece in pieces]


for _form in ("allgather", "allgatherv", "alltoall", "alltoallv", "alltoallw"):
    setattr(Topocomm, f"Neighbor_{_form}", blocking(_Raw, f"Neighbor_{_form}"))
    for _name in (f"Ineighbor_{_form}", f"Neighbor_{_form}_init"):
        setattr(Topocomm, _name, returning(_name, None, getattr(_Raw, _name)))


class Cartcomm(Topocomm, MPI.Cartcomm):
    """MPI.Cartcomm, guarded."""


def exchanging(form: str, name: str) -> Callable[..., Any]:
    """The call of that name, whose parts come from the sides that MPI names (`grids`)."""
    plain, with_types = getattr(_Raw, name), getattr(_Raw, name.replace(form, "alltoallw"))

    @wraps(plain)
    def exchange(self: Cartcomm, sendbuf: Any, recvbuf: Any, *info: Any, **options: Any) -> Any:
        order = grids.order_of_parts(self)
        if order is None:
            return plain(self, sendbuf, recvbuf, *info, **options)
        sent = grids.with_types(form, sendbuf, sorted(order))
        return with_types(self, sent, grids.with_types(form, recvbuf, order), *info, **options)

    return exchange


for _form in ("alltoall", "alltoallv", "alltoallw"):
    # Of the plain call: a blocking one that is refused leaves the epoch intact.
    setattr(Cartcomm, f"Ineighbor_{_form}", exchanging(_form, f"Ineighbor_{_form}"))
    setattr(Cartcomm, f"Neighbor_{_form}", blocking(Cartcomm, f"Neighbor_{_form}"))
    for _name in (f"Ineighbor_{_form}", f"Neighbor_{_form}_init"):
        setattr(Cartcomm, _name, returning(_name, None, exchanging(_form, _name)))
making(Cartcomm, MPI.Cartcomm, "Sub")


class Graphcomm(Topocomm, MPI.Graphcomm):
    """MPI.Graphcomm, guarded."""


class Distgraphcomm(Topocomm, MPI.Distgraphcomm):
    """MPI.Distgraphcomm, guarded."""


_KINDS: dict[int, type[Comm]] = {
    MPI.UNDEFINED: Comm,
    MPI.CART: Cartcomm,
    MPI.GRAPH: Graphcomm,
    MPI.DIST_GRAPH: Distgraphcomm,
}
"""The class of a communicator, by its topology."""


class Win(MPI.Win, metaclass=StandIn):
    """MPI.Win with the same methods; ranks agree on the collective ones first."""

    plain = MPI.Win
    comm: MPI.Comm | None = None
    """The communicator of its ranks."""


class File(MPI.File, metaclass=StandIn):
    """MPI.File with the same methods; ranks agree on the collective ones first."""

    plain = MPI.File
    comm: MPI.Comm | None = None
    """The communicator of its ranks."""


def _agrees(comm: object) -> bool:
    """Whether the ranks can agree; if not, a call is MPI's own, as after the epoch."""
    return isinstance(comm, Comm) and comm != MPI.COMM_NULL and not comm.stale


def _making(kind: type[Any], name: str) -> Any:
    plain = getattr(kind.plain, name)
    signature = inspect.signature(plain)

    @wraps(plain)
    def make(cls: type[Any], *arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options)
        given.apply_defaults()
        comm = given.arguments["comm"]
        if _agrees(comm):
            given.arguments["comm"] = Raw()
            with suppress(MPI.Exception):  # as in `_check`
                plain(*given.args, **given.kwargs)
            _check_values(**given.arguments)
            comm.agree(f"{kind.__name__}.{name}", _alike(**given.arguments))
        with deferred():
            made = getattr(super(kind, cls), name)(*arguments, **options)
            current().windows += kind is Win
        made.comm = comm
        return made

    return classmethod(make)


def _alike(*, filename: Any = None, amode: int = 0, **_: Any) -> tuple[Any, ...]:
    """What must be the same on every rank. Hosts may have a file in different folders."""
    return () if filename is None else (os.path.basename(os.fsdecode(filename)), amode)


_PREFIX = re.compile(r"\w+:")
"""Of a file's name: the file system that MPI takes."""


def _check_values(
    *, disp_unit: int = 1, size: int = 0, filename: Any = None, amode: int = 0, **_: Any
) -> None:
    """Raises the errors that MPI raises on one rank alone, while it waits on the others."""
    if disp_unit < 1:
        raise MPI.Exception(MPI.ERR_DISP)
    if size < 0:
        raise MPI.Exception(MPI.ERR_SIZE)
    if filename is None:
        return
    ways = MPI.MODE_RDONLY, MPI.MODE_WRONLY, MPI.MODE_RDWR
    if amode & sum(ways) not in ways:
        raise MPI.Exception(MPI.ERR_AMODE)
    path = os.path.abspath(os.fsdecode(filename))
    there = os.path.dirname(path) if amode & MPI.MODE_CREATE else path
    if not _PREFIX.match(os.fsdecode(filename)) and not os.path.exists(there):
        raise MPI.Exception(MPI.ERR_NO_SUCH_FILE)


def _together(kind: type[Any], name: str) -> Callable[..., Any]:
    plain = getattr(kind.plain, name)

    @wraps(plain)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if _agrees(self.comm):
            _check(kind.plain(), plain, *arguments, **options)
            self.comm.agree(f"{kind.__name__}.{name}")
        with deferred():
            found = plain(self, *arguments, **options)
            current().windows -= kind is Win and name == "Free"
        return found

    return call


_MAKING: dict[type[Any], tuple[str, ...]] = {
    Win: ("Create", "Allocate", "Allocate_shared", "Create_dynamic"),
    File: ("Open",),
}
_TOGETHER: dict[type[Any], tuple[str, ...]] = {
    Win: ("Fence", "Free"),
    File: (
        *("Close", "Set_size", "Preallocate", "Set_info", "Set_view", "Set_atomicity", "Sync"),
        *("Read_all", "Write_all", "Read_at_all", "Write_at_all", "Read_ordered", "Write_ordered"),
        *("Seek_shared", "Read_all_begin", "Read_all_end", "Write_all_begin", "Write_all_end"),
        *("Read_at_all_begin", "Read_at_all_end", "Write_at_all_begin", "Write_at_all_end"),
        *("Read_ordered_begin", "Read_ordered_end", "Write_ordered_begin", "Write_ordered_end"),
    ),
}

for _kind, _makers in _MAKING.items():
    for _name in _makers:
        setattr(_kind, _name, _making(_kind, _name))
    for _name in _TOGETHER[_kind]:
        setattr(_kind, _name, _together(_kind, _name))
