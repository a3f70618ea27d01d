"""Records the messages and collectives of this rank while a function runs. Runs in every rank.

The methods of `comm` are replaced on their class for that time, so communicators of `Split()` and
`Create_cart()` are recorded too. Collectives, and `send` and `recv` of allranks, come from the
journal of calls. Other ways to communicate with `comm` are refused (`hidden_handles.py`).

Sends are synchronous, if asked for: they end only when they are received. A program that ends only
thanks to the buffers of MPI then deadlocks with messages of any size, and the watch over the waits
finds it.
Source: MPI 4.1, section 3.5: a program is safe if it completes with synchronous sends.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from mpi4py import MPI

from allranks.collectives.calls import call as calls
from allranks.collectives.calls.call import Call, PointCall
from allranks.collectives.calls.sites import USER, Site, find, kind_of, shown_name
from allranks.collectives.ops import point_to_point
from allranks.collectives.ops.communicator import Comm, Win
from allranks.collectives.ops.point_to_point import PointToPoint
from allranks.collectives.world.world import World
from allranks.errors import CollectiveMismatch, RankLeft, UsageError
from allranks.grading.hidden_handles import HiddenHandles
from allranks.grading.patterns import base_name
from allranks.grading.traffic import ANY, COLLECTIVE, RECEIVE, SEND, RankRecord, RecordedCall

_MOST_EVENTS = 20_000
_PATIENCE_SECONDS = 0.3
"""Shorter than elsewhere, because a deadlock is likely."""
_SLOWEST_BYTES_A_SECOND = 5e6
_OURS = -1
"""The communicator of `send` and `recv`, whose calls have no tag here."""
_SYNCHRONOUS = {
    **{"Send": "Ssend", "Rsend": "Ssend", "send": "ssend"},
    **{"Isend": "Issend", "Irsend": "Issend", "isend": "issend"},
}
_BLOCKING = (
    *("Send", "Ssend", "Rsend", "Bsend", "send", "ssend", "bsend", "Recv", "recv"),
    *("Sendrecv", "Sendrecv_replace", "sendrecv"),
)
_POSTING = (
    *("Isend", "Issend", "Irsend", "Ibsend", "isend", "issend", "ibsend", "Irecv", "irecv"),
)
_POSTED_COLLECTIVES = tuple(
    f"I{name}"
    for name in (
        *("bcast", "gather", "gatherv", "scatter", "scatterv", "allgather", "allgatherv"),
        *("alltoall", "alltoallv", "alltoallw", "reduce", "allreduce", "reduce_scatter_block"),
        *("reduce_scatter", "scan", "exscan"),
    )
)
_COLLECTIVES = {base_name(name[1:]) for name in _POSTED_COLLECTIVES} | {
    *("broadcast", "neighborallgather", "neighboralltoall"),
}
_REFUSED = (
    *("Mprobe", "mprobe", "Improbe", "improbe", "Isendrecv", "Isendrecv_replace"),
    *("Send_init", "Ssend_init", "Rsend_init", "Bsend_init", "Recv_init"),
    *("Psend_init", "Precv_init"),
    *(name for name in vars(PointToPoint) if name.endswith("_init") and name != "__init__"),
)
_WINDOWS = ("Create", "Allocate", "Allocate_shared", "Create_dynamic")
_MISSING = object()


class CallRecorder:
    """Records from `start` to `stop`."""

    def __init__(self, world: World, *, synchronous: bool) -> None:
        self._world, self._synchronous = world, synchronous
        self._events: list[RecordedCall] = []
        self._posted: list[tuple[MPI.Request, RecordedCall, str]] = []
        self._restore = ExitStack()
        self._hidden = HiddenHandles(self._replace, _refusing)

    def start(self) -> None:
        replace = self._replace
        for name in (*_BLOCKING, *_POSTING):
            plain = getattr(PointToPoint, name)
            other = _SYNCHRONOUS.get(name) if self._synchronous else None
            replace(PointToPoint, name, self._recorded(name, plain, other))
        for name in _POSTED_COLLECTIVES:
            plain = getattr(PointToPoint, name)
            replace(PointToPoint, name, self._recorded_collective(name, plain))
        for name in _REFUSED:
            kind = Comm if name in vars(Comm) else PointToPoint
            replace(kind, name, _refusing(f"comm.{name}"))
        for name in _WINDOWS:
            replace(Win, name, _refusing(f"MPI.Win.{name}"))
        journal = self._world.journal
        replace(journal, "keep", self._noting(journal.keep))
        replace(journal, "add", self._noting(journal.add))
        replace(PointCall, "patience", _patience)
        if self._synchronous:
            replace(point_to_point, "post_send", MPI.Intracomm.Issend)
        self._hidden.start(vars(sys.modules["__main__"]))

    def stop(self) -> None:
        self._hidden.stop()
        self._restore.close()
        self._note_completed()

    @property
    def is_receiving(self) -> bool:
        """Whether a receive was posted and not waited for."""
        return bool(self._posted)

    def record(self, error: BaseException | None) -> RankRecord:
        """The record, after a program that ended with this error, or with none."""
        where = _line_of(error)
        stuck = failed = ""
        if isinstance(error, RankLeft | CollectiveMismatch) and self._world.dirty:
            stuck = str(where)
        elif error is not None:
            text = str(error).partition("\n")[0]
            failed = f"{type(error).__name__}{': ' if text else ''}{text} at {where}"
        # After a failure too: MPI would write the next program's messages into freed memory.
        unfinished = () if stuck else tuple(place for _, _, place in self._posted)
        return RankRecord(tuple(self._events), failed, stuck, unfinished)

    def _note(self, event: RecordedCall) -> None:
        self._note_completed()
        self._events.append(event)
        self._check_number()

    def _check_number(self) -> None:
        if len(self._events) + len(self._posted) > _MOST_EVENTS:
            raise UsageError(
                f"expect() records up to {_MOST_EVENTS:,} messages on a rank: found more. Is there "
                "a loop that does not end?"
            )

    def _note_completed(self) -> None:
        """Records the posted receives that the program has waited for."""
        # Not those whose message has arrived without a wait: the program cannot use it yet, and
        # the record would differ from run to run.
        still = []
        for request, event, place in self._posted:
            if request == MPI.REQUEST_NULL:
                self._events.append(event)
            else:
                still.append((request, event, place))
        self._posted = still

    def _recorded(
        self, name: str, plain: Callable[..., Any], synchronous: str | None
    ) -> Callable[..., Any]:
        signature = inspect.signature(plain)
        sends, receives = "dest" in signature.parameters, "source" in signature.parameters
        posts = name.lower().startswith("i")
        inner = getattr(PointToPoint, synchronous) if synchronous else plain

        @wraps(plain)
        def call(comm: PointToPoint, *arguments: Any, **options: Any) -> Any:
            bound = signature.bind(comm, *arguments, **options)
            bound.apply_defaults()
            given = bound.arguments
            if sends:
                tag = given.get("sendtag", given.get("tag", 0))
                self._message(SEND, name, comm, given["dest"], tag, _nbytes(given))
            if not receives:
                made = inner(*bound.args, **bound.kwargs)
                if posts:
                    made.op = name
                return made
            tag = given.get("recvtag", given.get("tag", ANY))
            if posts:
                request = inner(*bound.args, **bound.kwargs)
                event = self._event(RECEIVE, name, comm, given["source"], tag)
                if event is not None:
                    self._posted.append((request, event, str(find(sys._getframe(1)))))
                    self._check_number()
                return request
            status = given["status"] = given["status"] or MPI.Status()
            result = inner(*bound.args, **bound.kwargs)
            if given["source"] != MPI.PROC_NULL:
                self._message(RECEIVE, name, comm, status.Get_source(), status.Get_tag())
            return result

        return call

    def _recorded_collective(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def call(comm: PointToPoint, *arguments: Any, **options: Any) -> Any:
            nbytes = max(map(calls.nbytes_of, (*arguments, *options.values())), default=0)
            self._note(RecordedCall(COLLECTIVE, base_name(name[1:]), nbytes))
            return plain(comm, *arguments, **options)

        return call

    def _message(
        self, kind: str, op: str, comm: PointToPoint, peer: int, tag: int, nbytes: int = 0
    ) -> None:
        event = self._event(kind, op, comm, peer, tag, nbytes)
        if event is not None:
            self._note(event)

    def _event(
        self, kind: str, op: str, comm: PointToPoint, peer: int, tag: int, nbytes: int = 0
    ) -> RecordedCall | None:
        rank = ANY
        if peer != MPI.ANY_SOURCE:
            if not 0 <= peer < comm.size:
                return None  # PROC_NULL; MPI refuses others
            (rank,) = comm.peers(peer)
        tag = ANY if tag == MPI.ANY_TAG else tag
        return RecordedCall(kind, op, nbytes, rank, comm._number, tag)

    def _noting(self, plain: Callable[[Call], None]) -> Callable[[Call], None]:
        def note(call: Call) -> None:
            plain(call)
            op = call.spec.op
            if isinstance(call, PointCall):
                if op in ("send", "recv"):
                    kind = SEND if op == "send" else RECEIVE
                    self._note(RecordedCall(kind, op, call.nbytes, call.peers[0], _OURS))
            elif (name := base_name(op)) in _COLLECTIVES:
                self._note(RecordedCall(COLLECTIVE, name, call.nbytes))

        return note

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._restore.enter_context(_replaced(owner, name, value))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)  # it was inherited
        else:
            setattr(owner, name, before)


def _line_of(error: BaseException | None) -> Site | None:
    """The innermost line of the program in a traceback."""
    # By the traceback's own line numbers: frames of the cell itself are at its ``with`` by now.
    found, traceback = None, error.__traceback__ if error is not None else None
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if kind_of(name) == USER:
            found = Site(shown_name(name), traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _patience(call: PointCall) -> float:
    return _PATIENCE_SECONDS + call.nbytes / _SLOWEST_BYTES_A_SECOND if call.posted else 0.0


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UsageError(
            f"expect() records no {name}. Use send, recv, sendrecv, isend and irecv, or the same "
            "with a capital letter."
        )

    return refuse


def _nbytes(given: dict[str, Any]) -> int:
    """The bytes of the message that a call of `comm` with these arguments sends."""
    for name in ("obj", "sendobj"):
        if name in given:
            return len(MPI.pickle.dumps(given[name]))
    return _buffer_nbytes(given["sendbuf"] if "sendbuf" in given else given["buf"])


def _buffer_nbytes(buffer: Any) -> int:
    """The bytes that a buffer in one of mpi4py's forms sends, without gaps of its datatype."""
    whole = calls.nbytes_of(buffer)
    if not isinstance(buffer, list | tuple):
        return whole
    array, *rest = buffer
    datatype = rest.pop() if rest and isinstance(rest[-1], MPI.Datatype | str) else None
    if isinstance(datatype, str):
        datatype = MPI.Datatype.fromcode(datatype)
    nbytes = extent = getattr(array, "itemsize", 1)
    if datatype is not None:
        nbytes, extent = datatype.Get_size(), datatype.extent
    # As [array, count, type], [array, (count, displacement), type] or [array, type].
    count = rest[0] if rest else None
    if isinstance(count, Sequence):
        count = count[0]
    if count is None:
        count = whole // extent if extent else 0
    return int(count) * nbytes
