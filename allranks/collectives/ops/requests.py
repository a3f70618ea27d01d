"""Non-blocking calls of `comm`, and their requests, whose waits can be interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from mpi4py import MPI

from allranks.collectives.calls.call import PointCall
from allranks.collectives.calls.wait import Steps
from allranks.collectives.ops.operators import raise_kept
from allranks.collectives.ops.point_to_point import PointToPoint, Raw
from allranks.collectives.ops.stand_ins import StandIn

_Plain = MPI.Request
_PlainPersistent = MPI.Prequest


class Waiting:
    """The methods of a request that wait: they poll, and hear what `Comm` hears.

    Attributes:
        comm: whose call it is; None where nothing is known of it.
        op: the call's name.
        peer: the rank at the other end, or any.
        every: whether the call needs all ranks of the communicator.
        buffers: what it may be moving.
    """

    comm: PointToPoint | None = None
    op = "request"
    peer = MPI.ANY_SOURCE
    every = False
    buffers: tuple[Any, ...] = ()


def _waiting(name: str) -> Callable[..., Any]:
    """MPI's wait of that name, which ends at once where it is called."""
    plain = getattr(_Plain, name)
    one, any_will_do = name in ("Wait", "wait"), name.lower() in ("waitany", "waitsome")

    @wraps(plain)
    def wait(requests: Any, *arguments: Any, **options: Any) -> Any:
        _settle((requests,) if one else requests, name, one_will_do=any_will_do)
        found = plain(requests, *arguments, **options)
        raise_kept()
        return found

    return wait


# Of what each of MPI's tests returns, whether a request has completed.
_COMPLETED: dict[str, Callable[[Any], bool]] = {
    "Test": bool,
    "test": lambda found: bool(found[0]),
    "Testall": bool,
    "testall": lambda found: bool(found[0]),
    "Testany": lambda found: bool(found[1]),
    "testany": lambda found: bool(found[1]),
    "Testsome": bool,
    "testsome": lambda found: bool(found[0]),
}


def _testing(name: str) -> Callable[..., Any]:
    """MPI's test of that name, which raises what the function of an op has raised.

    Not before the request has completed: MPI still calls the op's function until then, and a
    caller that has caught the exception may free the op, which ends the process.
    """
    plain, completed = getattr(_Plain, name), _COMPLETED[name]

    @wraps(plain)
    def test(*arguments: Any, **options: Any) -> Any:
        found = plain(*arguments, **options)
        if completed(found):
            raise_kept()
        return found

    return test


for _one in ("Wait", "wait"):
    setattr(Waiting, _one, _waiting(_one))
for _many in ("Waitall", "waitall", "Waitany", "waitany", "Waitsome", "waitsome"):
    setattr(Waiting, _many, staticmethod(_waiting(_many)))
for _one in ("Test", "test"):
    setattr(Waiting, _one, _testing(_one))
for _many in ("Testall", "testall", "Testany", "testany", "Testsome", "testsome"):
    setattr(Waiting, _many, staticmethod(_testing(_many)))


class Request(Waiting, _Plain, metaclass=StandIn):
    """MPI.Request with the same methods."""

    plain = _Plain


class Prequest(Waiting, _PlainPersistent, metaclass=StandIn):
    """MPI.Prequest with the same methods: a request that is started again and again."""

    plain = _PlainPersistent


def _pending(requests: Sequence[_Plain]) -> list[_Plain]:
    return [request for request in requests if not request.Get_status()]


def _settle(requests: Sequence[_Plain], name: str, *, one_will_do: bool = False) -> None:
    """Ends when MPI's own wait would end at once: when all have completed, or one has.

    Where none of those under way is a guarded communicator's, that is left to MPI.
    """
    pending = _pending(requests)
    ours = [request for request in pending if getattr(request, "comm", None) is not None]
    if not ours or (one_will_do and len(pending) < len(requests)):
        return
    first: Any = ours[0]
    comm: PointToPoint = first.comm

    def steps(call: PointCall) -> Steps[None]:
        left = pending
        call.posted = True
        call.every = first.every and not one_will_do
        call.moves(*(buffer for one in ours for buffer in getattr(one, "buffers", ())))
        if one_will_do:
            call.peers = tuple(sorted({rank for one in ours for rank in _peers(one)}))
        # Whoever leaves this wait leaves what MPI may still write to.
        comm.keep(pending)
        while left and (not one_will_do or len(left) == len(pending)):
            yield call
            left = _pending(left)
            if not one_will_do and left and left[0] is not first:
                _await(call, left[0])
        comm.release(pending)

    title = first.op if len(requests) == 1 else f"{first.op}, {name}"
    comm.point(title, first.peer, steps)


def _peers(request: Any) -> tuple[int, ...]:
    comm = getattr(request, "comm", None)
    return comm.peers(request.peer) if comm is not None else ()


def _await(call: PointCall, request: _Plain) -> None:
    """What is waited for from now on is another one of several requests."""
    if isinstance(request, Waiting) and request.comm is not None:
        call.peers, call.every = request.comm.peers(request.peer), request.every


_ONE_PEER = {
    **dict.fromkeys(("Isend", "Issend", "Irsend", "isend", "issend"), ("dest", 1)),
    **dict.fromkeys(("Irecv", "irecv", "Recv_init"), ("source", 1)),
    **dict.fromkeys(("Send_init", "Ssend_init", "Rsend_init"), ("dest", 1)),
    "Psend_init": ("dest", 2),
    "Precv_init": ("source", 2),
    "Isendrecv": ("source", 4),
    "Isendrecv_replace": ("source", 3),
}
"""Calls that two ranks make: what the other one is called, and its place among the arguments."""
_ALL_PEERS = tuple(
    f"I{name.lower()}" if form == "I" else f"{name}_init"
    for form in ("I", "init")
    for name in ("Barrier", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather",
                 "Allgatherv", "Alltoall", "Alltoallv", "Alltoallw", "Reduce", "Allreduce",
                 "Reduce_scatter_block", "Reduce_scatter", "Scan", "Exscan")
)  # fmt: skip


class NonBlocking(PointToPoint):
    """The calls that return a request, which is a `Request`."""


def _returning(name: str, peer: tuple[str, int] | None) -> Callable[..., Request | Prequest]:
    plain = getattr(Raw, name)

    @wraps(plain)
    def post(self: NonBlocking, *arguments: Any, **options: Any) -> Request | Prequest:
        made = plain(self, *arguments, **options)
        request = (Prequest if isinstance(made, _PlainPersistent) else Request)(made)
        request.comm, request.op, request.every = self, name, peer is None
        request.buffers = arguments
        if peer is not None:
            word, place = peer
            given = arguments[place] if len(arguments) > place else MPI.ANY_SOURCE
            request.peer = options.get(word, given)
        return request

    return post


for _name in (*_ONE_PEER, *_ALL_PEERS):
    setattr(NonBlocking, _name, _returning(_name, _ONE_PEER.get(_name)))
