"""The transport between GPUs through NCCL, for groups with one rank on each GPU.

A collective is launched only when every member has agreed on it, so that nothing on a GPU waits for
a rank that may never come. The main thread polls an event for its end. A call that is left ends by
the abort of its communicator, and the next epoch makes another one.

An abort ends the kernels of the other members too, with garbage and without an error. So a rank
aborts a communicator only when every other member has ended its calls over it or has left, which
the board shows: no call sends anything for that. And a call whose kernel has ended has a result
only if no member has left it unfinished (`NcclTransport.confirm`).

Source: NCCL user guide, "Group Calls", "Point-to-point communication", "Fault Tolerance"; nccl.h,
ncclDataType_t and ncclRedOp_t. On aborts: NVIDIA/nccl, issue 863.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.arrays.reductions import (
    Arithmetic,
    ReduceOp,
    accumulator,
    is_half,
    name_of,
)
from allranks.collectives.calls.call import (
    Agreement,
    Call,
    Members,
    Pause,
    Steps,
    Transport,
    as_bytes,
    cut,
)
from allranks.collectives.calls.rank_state import RankState
from allranks.collectives.gpu.cupy_api import (
    BYTES,
    IN_PROGRESS,
    Communicator,
    CudaEvent,
    NcclModule,
    Stream,
    load_nccl,
)
from allranks.collectives.gpu.device import Device, start_thread
from allranks.errors import TransportFailed
from allranks.records.deferred import deferred
from allranks.records.ranks import label

_ID_NBYTES = 128
_ENDING_SECONDS = 10.0
"""How long a new communicator waits for the aborts of former ones."""
_TOLD_SECONDS, _LIMIT_SECONDS = 30.0, 300.0
"""Connecting takes 0.7 to 4 s; after these times a rank reports what to check, and gives up."""
_ADVICE = "NCCL_DEBUG=WARN in the ranks' environment makes NCCL print more."


class _Making(threading.Thread):
    """Creates a communicator; aborts it itself if the call was left meanwhile."""

    def __init__(
        self, device: Device, members: int, unique: bytes, me: int, unused: Callable[[], bool]
    ) -> None:
        super().__init__(name="allranks-nccl", daemon=True)
        self._members, self._unique, self._me = members, unique, me
        self._device, self._unused = device, unused
        self._lock = threading.Lock()
        self._left = False
        self.comm: Communicator | None = None
        self.problem: Exception | None = None

    def run(self) -> None:
        # With it calls return at once, with a result that cupy takes for an unknown error.
        os.environ.pop("NCCL_COMM_BLOCKING", None)
        # Connect for all algorithms now: otherwise the first use of one blocks within a call.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        try:
            self._device.aborts.wait(_ENDING_SECONDS)
            self._device.use()
            nccl = load_nccl()
            comm = nccl.NcclCommunicator(self._members, self._unique, self._me)
            with self._lock:
                self.comm, left = comm, self._left
            if left:
                self.leave()
                self._device.aborts.abort()
                return
            settle(comm, lambda: self._left)
            if self._members > 1 and not self._left:
                self._connect_pairs(nccl, comm)
        except Exception as error:
            self.problem = error

    def _connect_pairs(self, nccl: NcclModule, comm: Communicator) -> None:
        """Sends a byte between all pairs, as no variable makes NCCL connect these beforehand."""
        device, others = self._device, [i for i in range(self._members) if i != self._me]
        stream = device.new_stream()
        with stream:
            room = device.cupy.empty((2 * self._members,), np.uint8)
        nccl.groupStart()
        try:
            for i in others:
                comm.send(room.data.ptr + i, 1, BYTES, i, stream.ptr)
                comm.recv(room.data.ptr + self._members + i, 1, BYTES, i, stream.ptr)
        finally:
            nccl.groupEnd()
        settle(comm, lambda: self._left)
        done, pause = device.event(stream), Pause()
        while not self._left and not device.happened(done):
            pause()

    def leave(self) -> None:
        """No call waits for it any more; its NCCL call ends when the communicator is aborted."""
        with self._lock:
            self._left = True
            comm, self.comm = self.comm, None
        if comm is not None:
            self._device.aborts.park(comm, self._unused, self)


def settle(comm: Communicator, left: Callable[[], bool]) -> None:
    """Returns once nothing is being launched, or ``left()`` is true."""
    pause = Pause()
    while not left() and is_in_progress(comm):
        pause()


def is_in_progress(comm: Communicator) -> bool:
    """Whether a launch is in progress; raises RuntimeError if one has failed."""
    try:
        comm.check_async_error()
    except KeyError as error:
        # cupy raises KeyError for a result without a text: cupy 14,
        # cupy_backends/cuda/libs/nccl.pyx.
        if error.args != (IN_PROGRESS,):
            raise RuntimeError(f"NCCL returned the result {error}") from error
        return True
    return False


def _failed(error: RuntimeError) -> TransportFailed:
    """The error where NCCL refuses a launch, or reports a failed one."""
    more = last_error()
    return TransportFailed(
        f"NCCL has failed: {error}{f' ({more})' if more else ''}. The other ranks end their "
        f"calls, and the next cell starts a fresh communicator. {_ADVICE}"
    )


def last_error() -> str:
    try:
        library = ctypes.CDLL("libnccl.so.2")
        library.ncclGetLastError.restype = ctypes.c_char_p
        library.ncclGetLastError.argtypes = [ctypes.c_void_p]
        text = library.ncclGetLastError(None)
    except (OSError, AttributeError):
        return ""
    return text.decode("utf-8", "replace").strip() if text else ""


CODES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float32": 7,
    "float64": 8,
}
"""Without float16 (6) and bfloat16 (9): NCCL would sum them in their own precision."""
_SUM, _PROD, _MAX, _MIN = 0, 1, 2, 3
_OPS = {
    ReduceOp.Average: _SUM,
    ReduceOp.Sum: _SUM,
    ReduceOp.Product: _PROD,
    ReduceOp.Max: _MAX,
    ReduceOp.Min: _MIN,
}
# As bytes, "any" is the largest and "all" the least.
_BOOL = {ReduceOp.Sum: _MAX, ReduceOp.Max: _MAX, ReduceOp.Min: _MIN, ReduceOp.Product: _MIN}
_WIDER: dict[str, np.dtype[Any]] = {"int16": np.dtype(np.int32), "uint16": np.dtype(np.uint32)}
"""NCCL has no 16-bit integers. Wider ones, truncated, give the same for every reduction."""
_PARTS: dict[str, np.dtype[Any]] = {
    "complex64": np.dtype(np.float32),
    "complex128": np.dtype(np.float64),
}
"""A sum of complex numbers is two sums."""


class NcclForm(NamedTuple):
    """The form in which an array is passed to NCCL."""

    code: int
    op: int
    wider: np.dtype[Any] | None = None
    """The dtype to convert to first; None for no conversion."""
    seen: np.dtype[Any] | None = None
    """The dtype as which its memory is viewed; None for its own."""

    def view(self, array: NDArray[Any]) -> Any:
        return array if self.seen is None else array.view(self.seen)


Launch = Callable[[Any, Any, NcclForm, Stream], None]
"""Launches a reduction of one array to another one, both in the form for NCCL."""


@cache
def _form(op: int, dtype: np.dtype[Any]) -> NcclForm | None:
    # By the number: to hash a `ReduceOp` takes two calls of Python's.
    return nccl_form(ReduceOp(op), dtype)


def nccl_form(op: ReduceOp, dtype: np.dtype[Any]) -> NcclForm | None:
    """The form in which NCCL's reduction equals that of all transports; None if there is none."""
    name = name_of(dtype)
    if is_half(dtype) or (dtype.kind == "c" and op is ReduceOp.Product):
        return None
    if dtype.kind == "f" and op in (ReduceOp.Min, ReduceOp.Max):
        # The result must be NaN if a value is, and NCCL does not guarantee that.
        return None
    if dtype.kind == "b":
        return NcclForm(BYTES, _BOOL[op], seen=np.dtype(np.uint8))
    total = accumulator(op, dtype, "gpu")
    if total != dtype:
        return NcclForm(CODES[total.name], _OPS[op], wider=total)
    if name in _PARTS:
        return NcclForm(CODES[_PARTS[name].name], _OPS[op], seen=_PARTS[name])
    if name in _WIDER:
        return NcclForm(CODES[_WIDER[name].name], _OPS[op], wider=_WIDER[name])
    return NcclForm(CODES[name], _OPS[op])


Array = Any
"""An array on a GPU: a cupy.ndarray."""
Pieces = list[tuple[int, Array]]
"""For some members the array that is sent to each, or received from it."""


class NcclTransport:
    """Transport of arrays on GPUs over one communicator, made when it is first needed."""

    name = "nccl"

    def __init__(self, own: RankState, members: Members, device: Device, host: Transport) -> None:
        self.own, self.members, self.device, self.host = own, members, device, host
        self._epoch = own.epoch
        self._last: tuple[Agreement, int] | None = None
        """The last call that all members have agreed on: how they agreed, and its number."""
        self.stream = device.collectives
        # One call after the other uses these. If a call is left, they end with this transport.
        self._began, self._ended, self._done = self._new_events()
        self._comm: Communicator | None = None
        self._making: _Making | None = None

    @property
    def comm(self) -> Communicator:
        """The group's communicator of this epoch, after `connect`."""
        assert self._comm is not None
        return self._comm

    def connect(self, call: Call) -> Steps[None]:
        """Makes the communicator, the first time. Collective; all members have arrived."""
        self._last = call.agreement, call.number
        if self._comm is not None:
            return
        unique = yield from self._unique(call)
        making = self._making = _Making(
            self.device, self.members.size, unique, self.members.me, self._is_unused
        )
        ranks = label(self.members.ranks)
        try:
            start_thread(making)
        except RuntimeError as error:
            raise TransportFailed(
                f"NCCL needs a thread to connect {ranks}: {error}. "
                "ulimit -u shows how many this user may have; in a container --pids-limit=-1."
            ) from error
        call.stage += 1
        began, warned = time.monotonic(), False
        while making.is_alive():
            yield call
            waited = time.monotonic() - began
            if waited > _TOLD_SECONDS and not warned:
                warned = True
                self.device.notice(f"{self._late(waited)} It keeps waiting.")
            if waited > _LIMIT_SECONDS:
                raise TransportFailed(self._late(waited))
        if making.problem is not None:
            raise TransportFailed(
                f"NCCL could not connect {ranks}: {making.problem}. {_ADVICE}"
            ) from making.problem
        self._comm, self._making = making.comm, None

    def _late(self, waited: float) -> str:
        return (
            f"NCCL has not connected {label(self.members.ranks)} within {waited:.0f} s: it needs a "
            "network interface that all of them reach (NCCL_SOCKET_IFNAME=eth0 names it) and room "
            f"in /dev/shm (df -h /dev/shm; in a container --shm-size=1g). {_ADVICE}"
        )

    def _unique(self, call: Call) -> Steps[bytes]:
        """The first member's unique id, on all members; the byte before it is 1 if there is one."""
        word = np.zeros(1 + _ID_NBYTES, np.uint8)
        problem: Exception | None = None
        if self.members.me == 0:
            try:
                word[1:] = np.frombuffer(load_nccl().get_unique_id(), np.uint8)
                word[0] = 1
            except Exception as error:
                problem = error
        yield from call.moved(self.host.broadcast, word, 0)
        if not word[0]:
            why = str(problem) if problem is not None else "see its own error"
            raise TransportFailed(
                f"NCCL could not start on rank {self.members.ranks[0]}: {why}. {_ADVICE}"
            ) from problem
        return word[1:].tobytes()

    def abandon(self) -> None:
        """Ends work under way on the GPU; no other member needs to take part."""
        making, comm = self._making, self._comm
        self._making = self._comm = None
        if making is not None:
            making.leave()
        if comm is not None:
            # Freeing a communicator that hangs would hang.
            self.device.aborts.park(comm, self._is_unused)

    def _is_unused(self) -> bool:
        """Whether every other member has ended all calls over the communicator, or has left."""
        if self._last is None:
            return True
        agreement, number = self._last
        return all(self.own.has_left(rank, self._epoch) for rank in agreement.unfinished(number))

    def confirm(self, call: Call) -> Steps[None]:
        # The end of the work here proves nothing if a member has left before its own had ended.
        return self.own.while_one_has_left(call, self._epoch)

    def allreduce(
        self, call: Call, source: Array, out: Array, reduction: Arithmetic
    ) -> Steps[None]:
        form = _form(reduction.op._value_, reduction.dtype)
        if form is None:
            yield from self._by_pieces(call, source, out, reduction)
            return

        def launch(view: Array, into: Array, form: NcclForm, stream: Stream) -> None:
            send, recv = view.data.ptr, into.data.ptr
            self.comm.allReduce(send, recv, view.size, form.code, form.op, stream.ptr)

        yield from self._reduce(call, source, out, reduction, form, launch)

    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, reduction: Arithmetic
    ) -> Steps[None]:
        form = _form(reduction.op._value_, reduction.dtype)
        if form is None:
            yield from self._collect(call, source, bounds, out, reduction)
            return

        def launch(view: Array, into: Array, form: NcclForm, stream: Stream) -> None:
            width, code, op = view.size // source.size, form.code, form.op
            sizes = [(high - low) * width for low, high in pairwise(bounds)]
            if len(set(sizes)) == 1:
                send, recv = view.data.ptr, into.data.ptr
                self.comm.reduceScatter(send, recv, sizes[0], code, op, stream.ptr)
                return
            with _at_once(load_nccl()):
                for root, piece in enumerate(cut(view, sizes)):
                    if piece.size:
                        # Only the root's output is written, but every member has to pass one.
                        recv = (into if root == self.members.me else piece).data.ptr
                        self.comm.reduce(
                            piece.data.ptr, recv, piece.size, code, op, root, stream.ptr
                        )

        yield from self._reduce(call, source, out, reduction, form, launch)

    def broadcast(self, call: Call, array: Array, root: int) -> Steps[None]:
        at, nbytes = array.data.ptr, array.nbytes
        if nbytes:
            yield from self._move(
                call, lambda stream: self.comm.broadcast(at, at, nbytes, BYTES, root, stream.ptr)
            )

    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int], root: int
    ) -> Steps[list[Array]]:
        members = self.members
        reads = root in (-1, members.me)
        out = self.device.empty((sum(lengths) if reads else 0,), source.dtype)
        pieces = cut(out, lengths) if reads else [out] * members.size
        if root < 0 and len(set(lengths)) == 1:
            send, recv, nbytes = source.data.ptr, out.data.ptr, source.nbytes
            if nbytes:
                yield from self._move(
                    call,
                    lambda stream: self.comm.allGather(send, recv, nbytes, BYTES, stream.ptr),
                    out,
                )
        else:
            to = [(i, source) for i in (range(members.size) if root < 0 else [root])]
            yield from self._exchange(call, to, list(enumerate(pieces)) if reads else [])
        return pieces

    def alltoall(
        self, call: Call, source: Array, table: Sequence[Sequence[int]]
    ) -> Steps[list[Array]]:
        lengths = [row[self.members.me] for row in table]
        out = self.device.empty((sum(lengths),), source.dtype)
        pieces = cut(out, lengths)
        mine = cut(source, table[self.members.me])
        yield from self._exchange(call, list(enumerate(mine)), list(enumerate(pieces)))
        return pieces

    def _by_pieces(
        self, call: Call, source: Array, out: Array, reduction: Arithmetic
    ) -> Steps[None]:
        """For arithmetic that NCCL lacks: sums of half precision in float32, products of complex
        numbers, and minima and maxima with NaNs.

        Every member sends each member its part, which that member reduces and sends back: as many
        bytes as in a ring, and half precision stays half on the way.
        """
        size, me = self.members.size, self.members.me
        bounds = [source.size * i // size for i in range(size + 1)]
        parts = [out[low:high] for low, high in pairwise(bounds)]
        yield from self._collect(call, source, bounds, parts[me], reduction)
        to = [(i, parts[me]) for i in range(size) if i != me]
        yield from self._exchange(call, to, [(i, part) for i, part in enumerate(parts) if i != me])

    def _collect(
        self,
        call: Call,
        source: Array,
        bounds: Sequence[int],
        out: Array,
        reduction: Arithmetic,
    ) -> Steps[None]:
        size, me = self.members.size, self.members.me
        with self.device.behind_caller(call, self.stream):
            ready = reduction.prescaled(source)
            count = bounds[me + 1] - bounds[me]
            whole = np.empty_like(source, shape=(size * count,))
        theirs = [whole[i * count : (i + 1) * count] for i in range(size)]
        mine = [ready[low:high] for low, high in pairwise(bounds)]
        yield from self._exchange(call, list(enumerate(mine)), list(enumerate(theirs)))
        if count:
            with self.device.behind_caller(call, self.stream) as stream:
                reduction.combine(theirs, out)
                self._event(self._done, stream)
            yield from self._wait(call, self._done, has_moved=False)

    def _exchange(self, call: Call, sends: Pieces, receives: Pieces) -> Steps[None]:
        """Sends and receives bytes in one group; what goes to this member is copied."""
        me = self.members.me
        out = {i: as_bytes(piece) for i, piece in receives if piece.nbytes}
        ins = {i: as_bytes(piece) for i, piece in sends if piece.nbytes}

        def launch(stream: Stream) -> None:
            if me in out:
                np.copyto(out.pop(me), ins.pop(me))
            with _at_once(load_nccl()):
                for member, piece in ins.items():
                    if member != me:
                        self.comm.send(piece.data.ptr, piece.nbytes, BYTES, member, stream.ptr)
                for member, piece in out.items():
                    self.comm.recv(piece.data.ptr, piece.nbytes, BYTES, member, stream.ptr)

        yield from self._move(call, launch, sends, receives)

    def _reduce(
        self,
        call: Call,
        source: Array,
        out: Array,
        reduction: Arithmetic,
        form: NcclForm,
        launch: Launch,
    ) -> Steps[None]:
        """Writes NCCL's reduction of ``source``, passed in the form ``form``, to ``out``."""
        if not source.size:
            return
        device, stream, began = self.device, self.stream, self._began
        ready, total = source, out
        with device.cupy.cuda.Device(device.number):
            device.follow(call, stream, self._event(began, device.stream_of_caller()))
            if form.wider is not None or not reduction.copies:
                with stream:
                    ready = reduction.prescaled(source)
                    if form.wider is not None:
                        ready = ready.astype(form.wider)
                        total = np.empty_like(out, dtype=form.wider)
                    call.held = [call.held, ready, total]
            # Otherwise it begins where the caller's work ends, with an event less.
            if call.ready is not None or ready is not source:
                self._event(began, stream)
            try:
                launch(form.view(ready), form.view(total), form, stream)
            except RuntimeError as error:
                raise _failed(error) from error
            done = self._event(self._ended, stream)
            if reduction.scaled or total is not out:
                with stream:
                    reduction.finish(total, out)
                    done = self._event(self._done, stream)
        yield from self._wait(call, done)

    def _move(self, call: Call, launch: Callable[[Stream], None], *held: object) -> Steps[None]:
        """Lets NCCL move bytes, between arrays that are held until the call has ended."""
        with self.device.behind_caller(call, self.stream) as stream:
            call.held = [call.held, *held]
            self._event(self._began, stream)
            try:
                launch(stream)
            except RuntimeError as error:
                raise _failed(error) from error
            self._event(self._ended, stream)
        yield from self._wait(call, self._ended)

    def _check(self) -> None:
        """Raises `TransportFailed` if launched work has failed since."""
        if self._comm is not None:
            try:
                is_in_progress(self._comm)
            except RuntimeError as error:
                raise _failed(error) from error

    def _event(self, event: CudaEvent, stream: Stream) -> CudaEvent:
        event.record(stream)
        return event

    def _wait(self, call: Call, done: CudaEvent, *, has_moved: bool = True) -> Steps[None]:
        """Ends when ``done`` has happened; adds the GPU's time of the transfer to the call."""
        began, ended = (self._began, self._ended) if has_moved else (done, done)
        if call.queued is not None:
            self.device.queue(call, began, ended, done, self._check)
            # A stream of the user may be made to wait for these later.
            self._began, self._ended, self._done = self._new_events()
            return
        yield from self.device.wait(done, call, self._check)
        if has_moved:
            self.device.add_seconds(call, began, ended)

    def _new_events(self) -> list[CudaEvent]:
        return [self.device.events.take(timed=True) for _ in range(3)]


@contextmanager
def _at_once(nccl: Any) -> Iterator[None]:
    """A group: NCCL launches the calls within together."""
    # If an interrupt left the group open, later calls of this thread would be in it.
    with deferred():
        nccl.groupStart()
        try:
            yield
        finally:
            nccl.groupEnd()
