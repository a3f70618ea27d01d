"""Collectives of `comm`, MPI.Win and MPI.File, whose waits can be interrupted.

MPI has no non-blocking form of most calls for windows and files, so all ranks agree first: then
MPI's call is certain to end. Calls that concern one rank, as `Win.Lock`, are MPI's own and cannot
be interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from traceback import format_exception_only
from typing import Any

from mpi4py import MPI

from allranks.collectives.calls.call import Call, Steps, nbytes_of
from allranks.collectives.calls.guard import Spec
from allranks.collectives.mpi.transport import complete
from allranks.collectives.ops import operations
from allranks.collectives.ops.point_to_point import NonBlocking, Op, Raw, StandIn, raised
from allranks.errors import RankLeft, UsageError
from allranks.records.deferred import deferred

_ARGUMENTS = TypeError, ValueError, LookupError, BufferError
"""Exceptions of mpi4py for arguments that it cannot pass to MPI."""


class WrongRoot(UsageError, MPI.Exception):
    """A root that is not a rank; also the exception that mpi4py raises."""

    def __new__(cls, message: str) -> WrongRoot:  # MPI keeps its code there
        return MPI.Exception.__new__(cls, MPI.ERR_ROOT)

    def __init__(self, message: str) -> None:
        super().__init__(MPI.ERR_ROOT)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Collectives(NonBlocking):
    """The collectives of `Comm`.

    A collective that not all ranks call, or with another root, raises `CollectiveMismatch` before
    data moves. Buffers are not compared: mpi4py allows them to differ.
    """

    def _collective(
        self, op: str, post: Callable[..., MPI.Request], *arguments: Any, root: int | None = None
    ) -> None:
        group = self._group()
        whom = -1 if root is None else group.ranks[self._rooted(op, root)]

        def steps(call: Call) -> Steps[None]:
            yield from self._agreed(call)
            try:
                yield from complete(self._world.held_requests, call, post, self, *arguments)
            except _ARGUMENTS:
                self._world.refuse(call)
                raise

        nbytes = max(map(nbytes_of, arguments), default=0)
        self._world.run(group.call(Spec(f"comm.{op}", root=whom), op, nbytes, steps))
        if any(type(argument) is Op for argument in arguments):
            self._check_function(op)

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

    def agree(self, title: str) -> None:
        """Ends when all ranks have arrived at the same call of a window or a file."""
        self._world.run(self._group().call(Spec(title), title, steps=self._agreed))

    def _agreed(self, call: Call) -> Steps[None]:
        """Ends when all have arrived."""
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
        values = list(sendobj) if self.Get_rank() == self._rooted("scatter", root) else []
        self._as_many(values if self.Get_rank() == root else None, "scatter")
        call = operations.begin_object_alltoall(
            self._group(), "comm.scatter", values, "scatter", root
        )
        return self._world.run(call)[root]

    def alltoall(self, sendobj: Any) -> list[Any]:
        values = list(sendobj)
        self._as_many(values, "alltoall")
        result: list[Any] = self._world.run(
            operations.begin_object_alltoall(self._group(), "comm.alltoall", values, "alltoall")
        )
        return result

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        """Reduces picklable objects to the root, in the order of the ranks."""
        values = self._objects("reduce", sendobj, root)
        return None if values is None else _fold(values, op)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Reduces picklable objects to every rank, in the order of the ranks."""
        return _fold(self._objects("allreduce", sendobj), op)

    def scan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Reduces the objects of the ranks up to this one."""
        return _fold(self._objects("scan", sendobj)[: self.Get_rank() + 1], op)

    def exscan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Reduces the objects of the ranks before this one; None on the first rank."""
        before = self._objects("exscan", sendobj)[: self.Get_rank()]
        return _fold(before, op) if before else None

    def _rooted(self, op: str, root: int) -> int:
        last = self._group().size - 1
        if not 0 <= root <= last:
            raise WrongRoot(
                f"comm.{op} needs a root from 0 to {last}: found root={root}. Name one of them."
            )
        return root

    def _objects(self, op: str, value: Any, root: int | None = None) -> Any:
        index = -1 if root is None else self._rooted(op, root)
        return self._world.run(
            operations.begin_object_gather(self._group(), f"comm.{op}", value, op, index)
        )

    def _as_many(self, values: list[Any] | None, op: str) -> None:
        if values is not None and len(values) != self.Get_size():
            raise ValueError(
                f"{op} needs one object a rank: expected {self.Get_size()}, found {len(values)}."
            )


def blocking(kind: type[MPI.Comm], name: str, last: str = "") -> Callable[..., None]:
    """Guards the call of that name: two buffers and, as ``last``, an op or a root."""
    post = getattr(kind, f"I{name.lower()}")

    def plain(self: Collectives, sendbuf: Any, recvbuf: Any) -> None:
        self._collective(name, post, sendbuf, recvbuf)

    def reducing(self: Collectives, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        self._collective(name, post, sendbuf, recvbuf, op)

    def rooted(self: Collectives, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        self._collective(name, post, sendbuf, recvbuf, root, root=root)

    forms: dict[str, Callable[..., None]] = {"": plain, "op": reducing, "root": rooted}
    return wraps(getattr(kind, name))(forms[last])


_BLOCKING = {
    **dict.fromkeys(("Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Alltoallw"), ""),
    **dict.fromkeys(("Allreduce", "Reduce_scatter_block", "Scan", "Exscan"), "op"),
    **dict.fromkeys(("Gather", "Gatherv", "Scatter", "Scatterv"), "root"),
}
for _name, _last in _BLOCKING.items():
    setattr(Collectives, _name, blocking(Raw, _name, _last))


def _fold(values: list[Any], op: Any) -> Any:
    total = values[0]
    for value in values[1:]:
        total = op(total, value)
    return total


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


def _agree(comm: object, title: str) -> None:
    # A communicator of an earlier epoch cannot agree: then this is MPI's own call.
    if isinstance(comm, Collectives) and comm != MPI.COMM_NULL and not comm.stale:
        comm.agree(title)


def _making(kind: type[Any], name: str, place: int) -> Any:
    @wraps(getattr(kind.plain, name))
    def make(cls: type[Any], *arguments: Any, **options: Any) -> Any:
        comm = options.get("comm", arguments[place] if len(arguments) > place else None)
        _agree(comm, f"{kind.__name__}.{name}")
        with deferred():
            made = getattr(super(kind, cls), name)(*arguments, **options)
        made.comm = comm
        return made

    return classmethod(make)


def _together(kind: type[Any], name: str) -> Callable[..., Any]:
    plain = getattr(kind.plain, name)

    @wraps(plain)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        _agree(self.comm, f"{kind.__name__}.{name}")
        with deferred():
            return plain(self, *arguments, **options)

    return call


_MAKING = {
    Win: {"Create": 3, "Allocate": 3, "Allocate_shared": 3, "Create_dynamic": 1},
    File: {"Open": 0},
}
"""The position of the communicator among the arguments."""
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
    for _name, _place in _makers.items():
        setattr(_kind, _name, _making(_kind, _name, _place))
    for _name in _TOGETHER[_kind]:
        setattr(_kind, _name, _together(_kind, _name))
