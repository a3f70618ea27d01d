"""This rank's GPU: streams of its own for collectives, and waits that can be left.

Collectives run on streams of their own, behind everything that the caller's stream held when the
call was made. Results are allocated on the caller's stream, and their memory with it; what only a
collective needs is allocated and used on the collective's stream. So memory that is given back is
never used again before the work on it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import numpy as np

from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.wait import Awaited, Steps
from allranks.collectives.gpu.api import Event, Stream, load, load_nccl
from allranks.collectives.gpu.seats import Seat
from allranks.errors import MissingDependency, TransportFailed

TO_GPU, FROM_GPU = 1, 2
_PENDING = 600


class Device:
    """One GPU of this process."""

    def __init__(self, number: int) -> None:
        self.cupy = load()
        self.number = number
        self.runtime = self.cupy.cuda.runtime
        with self.cupy.cuda.Device(number):
            self.packing = self._new_stream()
            """Copies within the GPU, before arrays move."""
            self.down = self._new_stream()
            """Copies from the GPU."""
            self.up = self._new_stream()
            """Copies to the GPU: they run beside those from it."""
        self.blocks: dict[int, Array] = {}
        """Pinned memory, by the number of the group that stages its arrays there."""
        self._streams: dict[int, Stream] = {}
        self._held: list[tuple[list[Event], Call]] = []

    def _new_stream(self) -> Stream:
        stream: Stream = self.cupy.cuda.Stream(non_blocking=True)
        return stream

    def seat(self, host: int) -> Seat:
        """What other ranks must know of this GPU."""
        version, why = 0, ""
        try:
            version = load_nccl().get_version()
        except MissingDependency as error:
            why = str(error)
        bus = self.runtime.deviceGetPCIBusId(self.number)
        raw = self.runtime.getDeviceProperties(self.number).get("uuid", b"")
        return Seat(host, bus, uuid_text(bytes(raw)), version, why)

    def stream_of(self, group: int) -> Stream:
        """The stream of a group's collectives.

        Each group has one: on a common one, ranks that are in several groups and launch in
        different orders would wait for each other.
        """
        stream = self._streams.get(group)
        if stream is None:
            with self.cupy.cuda.Device(self.number):
                stream = self._streams[group] = self._new_stream()
        return stream

    def hold(self, call: Call) -> None:
        """Keeps the arrays of a call that was left until nothing that it queued can touch them."""
        events: list[Event] = []
        streams = (self.packing, self.down, self.up, self.stream_of(call.members.number))
        with suppress(RuntimeError), self.cupy.cuda.Device(self.number):
            events = [self.event(stream) for stream in streams]
        self._held.append((events, call))

    def mark(self) -> Event:
        """An event behind all that the caller's stream holds now."""
        if self._held:
            # Where no events could be recorded the GPU has failed: these are kept for ever.
            self._held = [
                (events, call)
                for events, call in self._held
                if not events or not all(map(self.happened, events))
            ]
        event: Event = self.cupy.cuda.Event(disable_timing=True)
        event.record(self.cupy.cuda.get_current_stream())
        return event

    @contextmanager
    def behind_caller(self, call: Call, stream: Stream | None = None) -> Iterator[Stream]:
        """What is queued inside goes to one of our streams, behind the caller's work.

        Nothing may yield inside: the current stream is the whole thread's.
        """
        stream = stream or self.packing
        with self.cupy.cuda.Device(self.number):
            stream.wait_event(self.mark())
            if call.ready is not None:
                stream.wait_event(call.ready)
            with stream:
                yield stream

    @contextmanager
    def copying(self, call: Call) -> Iterator[None]:
        """What is copied within goes behind what made the arrays, and before what follows."""
        with self.behind_caller(call) as stream:
            yield
            call.ready = self.event(stream)

    def event(self, stream: Stream, *, timed: bool = False) -> Event:
        """An event behind all that a stream holds now."""
        event: Event = self.cupy.cuda.Event(disable_timing=not timed)
        event.record(stream)
        return event

    def wait(
        self, event: Event, awaited: Awaited, check: Callable[[], None] | None = None
    ) -> Steps[None]:
        """Ends when an event has `happened`; ``check`` may raise in between."""
        awaited.stage += 1
        while not self.happened(event):
            if check is not None:
                check()
            yield awaited

    def happened(self, event: Event) -> bool:
        """Whether an event has happened.

        Not ``Event.done``: that reads an error of the GPU as "not yet", for ever.

        Raises:
            TransportFailed: the GPU has failed.
        """
        try:
            status = self.runtime.eventQuery(event.ptr)
        except RuntimeError as error:
            raise TransportFailed(_failed(str(error))) from error
        if status not in (0, _PENDING):
            raise TransportFailed(_failed(f"error {status}"))
        return status == 0

    def copy_down(self, host: Array, source: Any) -> None:
        """Queues a copy of a contiguous array to pinned host memory of as many bytes."""
        if source.nbytes:
            at = host.ctypes.data
            self.runtime.memcpyAsync(at, source.data.ptr, source.nbytes, FROM_GPU, self.down.ptr)

    def copy_up(self, out: Any, host: Array) -> None:
        """Queues a copy of pinned host memory to a contiguous array of as many bytes."""
        if out.nbytes:
            at = host.ctypes.data
            self.runtime.memcpyAsync(out.data.ptr, at, out.nbytes, TO_GPU, self.up.ptr)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised array on this GPU, its memory the caller's stream's."""
        with self.cupy.cuda.Device(self.number):
            return self.cupy.empty(shape, dtype)

    def pinned(self, nbytes: int) -> Array:
        """Host memory that the GPU copies to and from by itself."""
        from cupyx import empty_pinned

        memory: Array = empty_pinned(nbytes, np.uint8)
        return memory

    def pin(self, memory: Array) -> bool:
        """Pins memory that is there already; whether it could be."""
        try:
            with self.cupy.cuda.Device(self.number):
                self.runtime.hostRegister(memory.ctypes.data, memory.nbytes, 0)
        except RuntimeError:
            return False
        return True


def uuid_text(raw: bytes) -> str:
    """A GPU's UUID as the driver writes it."""
    if len(raw) != 16:
        return ""
    digits = raw.hex()
    cuts = (0, 8, 12, 16, 20, 32)
    return "GPU-" + "-".join(digits[a:b] for a, b in pairwise(cuts))


def _failed(what: str) -> str:
    return (
        f"a collective needs a GPU that works, and CUDA says {what}. What this process has on the "
        "GPU may be lost: restart the ranks."
    )
