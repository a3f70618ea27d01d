"""Data between GPUs through NCCL, which works on one rank a GPU.

A collective is launched once every member has agreed on it, so that nothing on a GPU waits for a
rank that may never come. What is launched is awaited by asking for an event, on the main thread;
a call that is left is ended by aborting the communicator, and the next epoch makes another.

Source: NCCL user guide, "Group Calls", "Point-to-point communication", "Fault Tolerance".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic
from allranks.collectives.calls.call import Call, Members
from allranks.collectives.calls.transport import Transport, as_bytes, cut
from allranks.collectives.calls.wait import Steps
from allranks.collectives.gpu.api import Communicator, Event, Stream, load_nccl
from allranks.collectives.gpu.device import Device
from allranks.collectives.gpu.nccl_comm import Connection
from allranks.collectives.gpu.nccl_types import BYTES, Wire, wire
from allranks.records.deferred import deferred

Array = Any
"""An array on a GPU: what cupy.ndarray is."""
Pieces = list[tuple[int, Array]]
"""For each of some members what goes to it, or comes from it."""


class Nccl:
    """Transport of arrays on GPUs over one communicator, made when it is first needed."""

    name = "nccl"

    def __init__(self, members: Members, device: Device, host: Transport) -> None:
        self.members, self.device = members, device
        self.connection = Connection(members, device, host)
        self.stream = device.collectives

    def abandon(self) -> None:
        """Ends what is under way on the GPU; nobody else has to be there."""
        self.connection.abandon()

    def allreduce(self, call: Call, source: Array, out: Array, how: Arithmetic) -> Steps[None]:
        """ncclAllReduce, where NCCL knows the dtype's arithmetic; see `_by_pieces` for the rest."""
        comm = yield from self.connection.comm(call)
        form = wire(how.op, how.dtype)
        if form is None:
            yield from self._by_pieces(call, comm, source, out, how)
            return

        def launch(view: Array, into: Array, form: Wire, stream: Stream) -> None:
            send, recv = view.data.ptr, into.data.ptr
            comm.allReduce(send, recv, view.size, form.code, form.op, stream.ptr)

        yield from self._reduce(call, source, out, how, form, launch)

    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, how: Arithmetic
    ) -> Steps[None]:
        """ncclReduceScatter, or where the members' parts differ in size one ncclReduce for each."""
        comm = yield from self.connection.comm(call)
        form = wire(how.op, how.dtype)
        if form is None:
            yield from self._collect(call, comm, source, bounds, out, how)
            return

        def launch(view: Array, into: Array, form: Wire, stream: Stream) -> None:
            width, code, op = view.size // source.size, form.code, form.op
            sizes = [(high - low) * width for low, high in pairwise(bounds)]
            if len(set(sizes)) == 1:
                send, recv = view.data.ptr, into.data.ptr
                comm.reduceScatter(send, recv, sizes[0], code, op, stream.ptr)
                return
            with _at_once(load_nccl()):
                for root, piece in enumerate(cut(view, sizes)):
                    if piece.size:
                        # Only the root's output is written; the others' is asked for all the same.
                        recv = (into if root == self.members.me else piece).data.ptr
                        comm.reduce(piece.data.ptr, recv, piece.size, code, op, root, stream.ptr)

        yield from self._reduce(call, source, out, how, form, launch)

    def broadcast(self, call: Call, array: Array, root: int) -> Steps[None]:
        """ncclBroadcast of bytes, in place."""
        comm = yield from self.connection.comm(call)
        at, nbytes = array.data.ptr, array.nbytes
        if nbytes:
            yield from self._move(
                call, lambda stream: comm.broadcast(at, at, nbytes, BYTES, root, stream.ptr)
            )

    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int], root: int
    ) -> Steps[list[Array]]:
        """ncclAllGather; where the members' parts differ in size, or go to one, send and recv."""
        comm = yield from self.connection.comm(call)
        members = self.members
        reads = root in (-1, members.me)
        out = self.device.empty((sum(lengths) if reads else 0,), source.dtype)
        pieces = cut(out, lengths) if reads else [out] * members.size
        if root < 0 and len(set(lengths)) == 1:
            send, recv, nbytes = source.data.ptr, out.data.ptr, source.nbytes
            if nbytes:
                yield from self._move(
                    call, lambda stream: comm.allGather(send, recv, nbytes, BYTES, stream.ptr), out
                )
        else:
            to = [(i, source) for i in (range(members.size) if root < 0 else [root])]
            yield from self._exchange(call, comm, to, list(enumerate(pieces)) if reads else [])
        return pieces

    def alltoall(
        self, call: Call, source: Array, table: Sequence[Sequence[int]]
    ) -> Steps[list[Array]]:
        """ncclSend and ncclRecv with every member, launched as one group."""
        comm = yield from self.connection.comm(call)
        lengths = [row[self.members.me] for row in table]
        out = self.device.empty((sum(lengths),), source.dtype)
        pieces = cut(out, lengths)
        mine = cut(source, table[self.members.me])
        yield from self._exchange(call, comm, list(enumerate(mine)), list(enumerate(pieces)))
        return pieces

    def _by_pieces(
        self, call: Call, comm: Communicator, source: Array, out: Array, how: Arithmetic
    ) -> Steps[None]:
        """For arithmetic that NCCL does not do as ours: sums of half precision in float32, products
        of complex numbers, the least and the largest where a NaN is among them.

        Everyone sends every member its part, which that one reduces and sends back: as many bytes
        as a ring moves, and half precision stays half on the way.
        """
        size, me = self.members.size, self.members.me
        bounds = [source.size * i // size for i in range(size + 1)]
        parts = [out[low:high] for low, high in pairwise(bounds)]
        yield from self._collect(call, comm, source, bounds, parts[me], how)
        to = [(i, parts[me]) for i in range(size) if i != me]
        yield from self._exchange(
            call, comm, to, [(i, part) for i, part in enumerate(parts) if i != me]
        )

    def _collect(
        self,
        call: Call,
        comm: Communicator,
        source: Array,
        bounds: Sequence[int],
        out: Array,
        how: Arithmetic,
    ) -> Steps[None]:
        """``out`` is this member's part of the reduction, all members' parts of it side by side."""
        size, me = self.members.size, self.members.me
        with self.device.behind_caller(call, self.stream):
            ready = how.prescaled(source)
            count = bounds[me + 1] - bounds[me]
            whole = np.empty_like(source, shape=(size * count,))
        theirs = [whole[i * count : (i + 1) * count] for i in range(size)]
        mine = [ready[low:high] for low, high in pairwise(bounds)]
        yield from self._exchange(call, comm, list(enumerate(mine)), list(enumerate(theirs)))
        if count:
            with self.device.behind_caller(call, self.stream) as stream:
                how.combine(theirs, out)
                done = self._event(stream)
            yield from self.device.wait(done, call, self.connection.check)
            self.device.events.give_back(done, timed=True)

    def _exchange(
        self, call: Call, comm: Communicator, sends: Pieces, receives: Pieces
    ) -> Steps[None]:
        """Sends and receives of bytes, all at once; one to oneself is a copy."""
        me = self.members.me
        out = {i: as_bytes(piece) for i, piece in receives if piece.nbytes}
        ins = {i: as_bytes(piece) for i, piece in sends if piece.nbytes}

        def launch(stream: Stream) -> None:
            if me in out:
                np.copyto(out.pop(me), ins.pop(me))
            with _at_once(load_nccl()):
                for member, piece in ins.items():
                    if member != me:
                        comm.send(piece.data.ptr, piece.nbytes, BYTES, member, stream.ptr)
                for member, piece in out.items():
                    comm.recv(piece.data.ptr, piece.nbytes, BYTES, member, stream.ptr)

        yield from self._move(call, launch, sends, receives)

    def _reduce(
        self,
        call: Call,
        source: Array,
        out: Array,
        how: Arithmetic,
        form: Wire,
        launch: Callable[[Array, Array, Wire, Stream], None],
    ) -> Steps[None]:
        """Writes what NCCL makes of ``source``, as ``form`` shows it, into ``out``."""
        if source.size:
            with self.device.behind_caller(call, self.stream) as stream:
                ready, total = how.prescaled(source), out
                if form.wider is not None:
                    ready, total = ready.astype(form.wider), np.empty_like(out, dtype=form.wider)
                call.held = [call.held, ready, total]
                began = self._event(stream)
                with self.connection.launching():
                    launch(form.view(ready), form.view(total), form, stream)
            yield from self.connection.launched(call)
            with self.device.on(self.stream) as stream:
                ended = self._event(stream)
                how.finish(total, out)
                done = self._event(stream)
            yield from self._wait(call, began, ended, done)

    def _move(self, call: Call, launch: Callable[[Stream], None], *held: object) -> Steps[None]:
        """Has NCCL move bytes, between arrays that are held until the call has ended."""
        with self.device.behind_caller(call, self.stream) as stream:
            call.held = [call.held, *held]
            began = self._event(stream)
            with self.connection.launching():
                launch(stream)
        yield from self.connection.launched(call)
        ended = self._event(self.stream)
        yield from self._wait(call, began, ended, ended)

    def _event(self, stream: Stream) -> Event:
        return self.device.event(stream, timed=True)

    def _wait(self, call: Call, began: Event, ended: Event, done: Event) -> Steps[None]:
        """Ends when ``done`` has happened; notes how long the GPU was at the transfer."""
        yield from self.device.wait(done, call, self.connection.check)
        milliseconds = self.device.runtime.eventElapsedTime(began.ptr, ended.ptr)
        call.device_seconds = (call.device_seconds or 0.0) + milliseconds / 1e3
        self.device.events.give_back(*{began, ended, done}, timed=True)


@contextmanager
def _at_once(nccl: Any) -> Iterator[None]:
    """NCCL carries out what is called within together.

    Interrupts wait: into a group that was left open all later calls of this thread would go.
    """
    with deferred():
        nccl.groupStart()
        try:
            yield
        finally:
            nccl.groupEnd()
