"""This rank's GPU: streams of its own for collectives, events, waits that can be left; the order of
calls, and the aborts, of all NCCL communicators on it.

Collectives run on streams of their own, behind everything that the caller's stream held when the
call was made. Results are allocated on the caller's stream, and their memory with it; what only a
collective needs is allocated and used on the collective's stream. So freed memory is never used
again before the work on it is done.

NCCL's kernels wait for each other between GPUs, and one may keep another from starting: a GPU has
to start those of several communicators in the same order everywhere. Programs post to their process
sets in any order, so the ranks number a call once all of its members have arrived: each proposes a
number above all that it has seen, the call gets the largest, and every rank goes by these numbers.

An abort returns once every member has aborted, and it waits for the whole GPU: it can be blocked by
a member that computes, and by the kernel of a communicator that is not aborted yet. It ends other
members' kernels with garbage. So communicators that are to end are collected, and a thread waits
until no other member uses them, aborts them as one group, and waits for the end.

Source: CUDA runtime API, cudaEventRecord. NCCL user guide, "Using multiple NCCL communicators
concurrently", "Fault Tolerance" and "Group Calls"; NCCL 2.30, src/init.cc, ncclCommAbort, which
makes kernels and waiting calls end at once, and leaves the rest, freeing the communicator, to
ncclGroupEnd. The numbering is Skeen's: K. Birman and T. Joseph, Reliable communication in the
presence of failures, 1987, section 3.2.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls.call import Awaited, Call, Pause, Steps, Transport
from allranks.collectives.gpu.cupy_api import Communicator, CudaEvent, Stream, load, load_nccl
from allranks.collectives.gpu.windows import GpuWindows
from allranks.errors import TransportFailed

_KEPT = 64
"""Spare events of either kind; only many calls that were posted together use more at once."""


class EventPool:
    """Spare events, with and without timing, so that calls need not create any.

    A released event may be recorded again at once: a stream that already waits for it waits for
    what it marked at that time. A call that is left releases nothing: its events end with it.
    """

    def __init__(self, make: Callable[[bool], CudaEvent]) -> None:
        self._make = make
        self._spare: dict[bool, list[CudaEvent]] = {False: [], True: []}

    def take(self, *, timed: bool = False) -> CudaEvent:
        # Without a check first: the thread that connects NCCL takes events too.
        try:
            return self._spare[timed].pop()
        except IndexError:
            return self._make(timed)

    def give_back(self, *events: CudaEvent, timed: bool = False) -> None:
        spare = self._spare[timed]
        if len(spare) < _KEPT:
            spare.extend(events)


T = TypeVar("T")
TO_GPU, FROM_GPU = 1, 2
_PENDING = 600


class Device:
    """One GPU of this process."""

    def __init__(self, number: int, sets: Collection[int], notice: Callable[[str], None]) -> None:
        self.cupy = load()
        self.number, self.sets = number, sets
        """The GPU's number, and the numbers of the process sets beside the whole world."""
        self.notice = notice
        """Shows the user a message. Not a warning, which may be an error on one rank of a call."""
        self.runtime = self.cupy.cuda.runtime
        self.kind: Any = self.cupy.ndarray
        with self.cupy.cuda.Device(number):
            self.packing = self.new_stream()
            """Copies within the GPU, before arrays move."""
            self.down = self.new_stream()
            """Copies from the GPU."""
            self.up = self.new_stream()
            """Copies to the GPU: they run beside those from it."""
            self.collectives = self.new_stream()
            """NCCL's work of all groups, in the order of `call_order`, and reads of other ranks'
            windows."""
        self.events = EventPool(self._new_event)
        self.call_order = NcclCallOrder()
        self.aborts = Aborts(self.use, self._before_abort)
        """Communicators to abort."""
        self.windows = GpuWindows(self.cupy, number)
        self.blocks: dict[int, Array] = {}
        """Pinned memory, by the number of the group that stages its arrays in it."""
        self._registered: set[int] = set()
        """The addresses of existing memory that was pinned."""
        self.streams_wait = False
        """Whether a stream of the user may wait for NCCL's work of calls that have not ended."""
        self._held: list[tuple[list[CudaEvent], Call]] = []
        """Calls that were left, and the events after which nothing touches their arrays."""
        self._kept: list[Array] = []
        """Pinned memory that groups have released and that such a call may still use."""

    def use(self) -> None:
        # A ``with`` is not enough in a new thread: it calls cudaSetDevice only if another GPU is
        # the current one, and there GPU 0 is, without a context (cupy 14, cupy/cuda/device.pyx).
        self.cupy.cuda.Device(self.number).use()

    def new_stream(self) -> Stream:
        stream: Stream = self.cupy.cuda.Stream(non_blocking=True)
        return stream

    def uuid(self) -> bytes:
        # From the driver: cupy cuts it at a zero byte.
        raw, device = (ctypes.c_ubyte * 16)(), ctypes.c_int()
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            failed = driver.cuDeviceGet(ctypes.byref(device), self.number)
            if not failed and not driver.cuDeviceGetUuid_v2(raw, device):
                return bytes(raw)
        except (OSError, AttributeError):
            pass
        return bytes(self.runtime.getDeviceProperties(self.number).get("uuid", b""))

    @property
    def aborts_first(self) -> bool:
        """Whether communicators have to be aborted before anything is queued on the GPU: while the
        main thread waits in a copy to the host, CUDA's other calls that queue work, as the record
        of an event, wait for that copy; and it may wait for what the abort ends.
        """
        return self.streams_wait and threading.current_thread() is not threading.main_thread()

    def leave(self, calls: Iterable[Call]) -> None:
        """Ends the communicators, and keeps the arrays of calls that were left."""
        for call in calls:
            self.hold(call)
        self.end()

    def end(self) -> None:
        self.call_order.clear()
        self.aborts.abort()
        self._let_go()

    def _before_abort(self) -> Callable[[], bool]:
        """Whether communicators may be aborted: the GPU has done what it was given until now."""
        if self.streams_wait:
            # What waits for NCCL's work ends by the abort alone.
            return lambda: True
        return self.once_idle()

    def once_idle(self, *also: Stream) -> Callable[[], bool]:
        """Whether the GPU has done what it was given until now; NCCL's own work, in the stream
        ``collectives``, counts only if that stream is named.
        """
        try:
            with self.cupy.cuda.Device(self.number):
                events = [
                    self.event(stream) for stream in (self.packing, self.down, self.up, *also)
                ]
                events.append(self.mark())
        except RuntimeError:  # the GPU has failed: it does nothing more
            return lambda: True

        def done() -> bool:
            try:
                return all(map(self.happened, events))
            except TransportFailed:
                return True

        return done

    def hold(self, call: Call) -> None:
        """Keeps the arrays of a call that was left until none of its queued work can use them."""
        events: list[CudaEvent] = []
        streams = (self.packing, self.down, self.up, self.collectives)
        with suppress(RuntimeError), self.cupy.cuda.Device(self.number):
            events = [self.event(stream) for stream in streams]
        self._held.append((events, call))

    def _let_go(self) -> None:
        """Frees held arrays, and unpins released memory, once the GPU no longer uses them."""
        self.windows.all_closed()
        # If the GPU has failed, or no event could be recorded, they are kept for ever.
        with suppress(TransportFailed):
            self._held = [h for h in self._held if not (h[0] and all(map(self.happened, h[0])))]
        if self._held:
            return
        kept, self._kept = self._kept, []
        for memory in kept:
            if memory.ctypes.data in self._registered:
                self._registered.discard(memory.ctypes.data)
                with suppress(RuntimeError), self.cupy.cuda.Device(self.number):
                    self.runtime.hostUnregister(memory.ctypes.data)

    def has(self, *arrays: Any) -> bool:
        """Whether all are contiguous arrays of cupy on this GPU."""
        kind, number = self.kind, self.number
        for array in arrays:
            if (
                type(array) is not kind
                or array.data.device_id != number
                or not array.flags.c_contiguous
            ):
                return False
        return True

    def stream_of_caller(self) -> Stream:
        if self._held:
            self._let_go()
        return self.cupy.cuda.get_current_stream()

    def mark(self) -> CudaEvent:
        """An event behind all work that is in the caller's stream now."""
        return self.event(self.stream_of_caller())

    def marked(self, call: Call) -> Call:
        with self.cupy.cuda.Device(self.number):
            call.ready = self.mark()
        call.steps = self._unmarked(call, call.steps)
        return call

    def _unmarked(self, call: Call, steps: Steps[T]) -> Steps[T]:
        """A call's steps, which release its event at their end."""
        result = yield from steps
        self.events.give_back(call.ready)
        return result

    def settle(self) -> None:
        """Waits for the caller's stream, in which no work waits for another rank."""
        with self.cupy.cuda.Device(self.number):
            event = self.mark()
        pause = Pause()
        while not self.happened(event):
            pause()
        self.events.give_back(event)

    def follow(self, call: Call, stream: Stream, mark: CudaEvent) -> None:
        """Lets one of our streams wait for the caller's work, at whose end ``mark`` happens."""
        stream.wait_event(mark)
        if call.ready is not None:
            stream.wait_event(call.ready)

    @contextmanager
    def behind_caller(self, call: Call, stream: Stream | None = None) -> Iterator[Stream]:
        """Work queued within goes to one of our streams, behind the caller's work.

        No step may yield within: the current stream is that of the whole thread.
        """
        stream = stream or self.packing
        with self.cupy.cuda.Device(self.number):
            mark = self.mark()
            self.follow(call, stream, mark)
            self.events.give_back(mark)
            with stream:
                yield stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[Stream]:
        """Work queued within goes to one of our streams; no step may yield within."""
        with self.cupy.cuda.Device(self.number), stream:
            yield stream

    @contextmanager
    def copying(self, call: Call) -> Iterator[None]:
        with self.behind_caller(call) as stream:
            yield
            # The call waits for the copies, which wait for the work that made the arrays.
            before, call.ready = call.ready, self.event(stream)
            if before is not None:
                self.events.give_back(before)

    def event(self, stream: Stream, *, timed: bool = False) -> CudaEvent:
        """An event behind all work that is in a stream now; release it with `events.give_back`."""
        event = self.events.take(timed=timed)
        event.record(stream)
        return event

    def _new_event(self, timed: bool) -> CudaEvent:
        with self.cupy.cuda.Device(self.number):
            event: CudaEvent = self.cupy.cuda.Event(disable_timing=not timed)
            return event

    def wait(
        self, event: CudaEvent, awaited: Awaited, check: Callable[[], None] | None = None
    ) -> Steps[None]:
        """Ends when an event has `happened`; ``check`` may raise in between."""
        awaited.stage += 1
        while not self.happened(event):
            if check is not None:
                check()
            yield awaited

    def queue(
        self, call: Call, began: CudaEvent, ended: CudaEvent, done: CudaEvent,
        check: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """As `wait`, for the caller's stream in place of the host. The transfer is between the
        first two events.
        """
        self.streams_wait = True
        self.cupy.cuda.get_current_stream().wait_event(done)
        assert call.queued is not None
        call.queued.append((began, ended, done, check))

    def until_ended(self, call: Call) -> Steps[None]:
        """Ends when the GPU has done all that `queue` has noted of a call."""
        for began, ended, done, check in call.queued or ():
            yield from self.wait(done, call, check)
            self.add_seconds(call, began, ended)
        # Not to the pool: a stream of the user may be made to wait for them later.
        call.queued = []

    def add_seconds(self, call: Call, began: CudaEvent, ended: CudaEvent) -> None:
        """Adds the time between two timed events, by the GPU's clock, to that of a call."""
        milliseconds = self.runtime.eventElapsedTime(began.ptr, ended.ptr)
        call.device_seconds = (call.device_seconds or 0.0) + milliseconds / 1e3

    def happened(self, event: CudaEvent) -> bool:
        try:
            # Not ``Event.done``, which reports an error of the GPU as "not yet", for ever.
            status = self.runtime.eventQuery(event.ptr)
        except RuntimeError as error:
            raise TransportFailed(_failed(str(error))) from error
        if status not in (0, _PENDING):
            raise TransportFailed(_failed(f"error {status}"))
        return status == 0

    def copy_down(self, host: Array, source: Any) -> None:
        """Queues a copy of a contiguous array to pinned host memory of as many bytes."""
        if source.nbytes:
            ends = host.ctypes.data, source.data.ptr
            self.runtime.memcpyAsync(*ends, source.nbytes, FROM_GPU, self.down.ptr)

    def copy_up(self, out: Any, host: Array) -> None:
        if out.nbytes:
            ends = out.data.ptr, host.ctypes.data
            self.runtime.memcpyAsync(*ends, out.nbytes, TO_GPU, self.up.ptr)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised array on this GPU, allocated on the caller's stream."""
        with self.cupy.cuda.Device(self.number):
            return self.cupy.empty(shape, dtype)

    def over(self, at: int, nbytes: int) -> Any:
        """An array of bytes over existing memory of this GPU."""
        memory = self.cupy.cuda.UnownedMemory(at, nbytes, None, self.number)
        return self.cupy.ndarray((nbytes,), np.uint8, self.cupy.cuda.MemoryPointer(memory, 0))

    def pinned(self, nbytes: int) -> Array:
        from cupyx import empty_pinned

        memory: Array = empty_pinned(nbytes, np.uint8)
        return memory

    def pin(self, memory: Array) -> bool:
        """Pins existing memory, in whole pages; returns whether that was possible."""
        at = memory.ctypes.data
        try:
            with self.cupy.cuda.Device(self.number):
                self.runtime.hostRegister(at, memory.nbytes, 0)
        except RuntimeError as error:
            self.notice(
                "arrays are staged through memory of this rank only, which is slower: the memory "
                f"that the ranks share cannot be pinned ({error})."
            )
            return False
        self._registered.add(at)
        return True

    def forget(self, group: int) -> None:
        """Releases the pinned memory of a group, once no call that was left uses it, and leaves its
        window to another one.
        """
        self.windows.forget(group)
        memory = self.blocks.pop(group, None)
        if memory is not None:
            self._kept.append(memory)
            self._let_go()


class NcclCallOrder:
    """The calls that this rank has agreed on and that have not ended, by their numbers."""

    def __init__(self) -> None:
        self._last = 0
        self._calls: dict[int, tuple[tuple[int, int], Call]] = {}
        """For each group its call, with the call's number, or the least number that it can get."""

    def enter(self, call: Call, host: Transport) -> Steps[None]:
        """Ends when it is this call's turn on all of its members, which have agreed on it."""
        number, size = call.members.number, call.members.size
        self._last += 1
        self._calls[number] = (self._last, number), call
        proposed = np.array([self._last], np.int64).view(np.uint8)
        every: list[Any] = yield from call.moved(host.allgather, proposed, [8] * size)
        chosen = max(int(each.view(np.int64)[0]) for each in every)
        self._last = max(self._last, chosen)
        mine = chosen, number
        self._calls[number] = mine, call
        call.stage += 1
        # A call whose number is only proposed gets that number or a larger one.
        while (ahead := min(self._calls.values()))[0] < mine:
            call.behind = ahead[1]
            yield call
        call.behind = None
        # On a member whose turn has not come the host may have to act first, and work launched here
        # could block it: a call that waits for the whole GPU waits for the other members.
        yield from call.moved(host.allgather, proposed[:1], [1] * size)
        call.stage += 1

    def leave(self, call: Call) -> None:
        call.behind = None
        found = self._calls.get(call.members.number)
        if found is not None and found[1] is call:
            del self._calls[call.members.number]

    def clear(self) -> None:
        self._calls.clear()


_IN_A_GROUP = 22200
"""The first NCCL version that allows aborts within a group."""


class Parked(NamedTuple):
    """A communicator that is to be aborted."""

    communicator: Communicator
    unused: Callable[[], bool]
    """Whether no other member can still get a result over it."""
    user: threading.Thread | None
    """A thread that may still be in a call on it."""


class Aborts:
    """Communicators that are no longer used, until they have been aborted."""

    def __init__(
        self, use_gpu: Callable[[], None], once_idle: Callable[[], Callable[[], bool]]
    ) -> None:
        self._use_gpu, self._once_idle = use_gpu, once_idle
        self._parked: list[Parked] = []
        self._threads: list[threading.Thread] = []
        # The threads that create communicators park those whose call was left.
        self._lock = threading.Lock()

    def park(
        self,
        communicator: Communicator,
        unused: Callable[[], bool],
        user: threading.Thread | None = None,
    ) -> None:
        """Keeps a communicator until the next `abort`."""
        # Until then other members may still need this rank's end of it.
        with self._lock:
            self._parked.append(Parked(communicator, unused, user))

    def abort(self, *, completed: bool = False) -> None:
        """Aborts all that are parked, together, once no other member uses them; returns at once.

        Args:
            completed: whether it is known that no other member uses them.
        """
        with self._lock:
            ended, self._parked = self._parked, []
        if not ended:
            return
        # While an abort frees memory of the GPU, all calls of CUDA of this process wait for it, and
        # it for the work that the GPU has: so the abort comes after that work.
        thread = threading.Thread(
            target=self._abort,
            args=[ended, completed, self._once_idle()],
            name="allranks-nccl-abort",
            daemon=True,
        )
        try:
            start_thread(thread)
        except RuntimeError:  # no thread available: abort them the next time
            with self._lock:
                self._parked = [*ended, *self._parked]
            return
        with self._lock:
            self._threads = [each for each in [*self._threads, thread] if each.is_alive()]

    def wait(self, seconds: float) -> None:
        """Returns when all aborts have returned, or after ``seconds``."""
        end = time.monotonic() + seconds
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            _join(thread, end - time.monotonic())

    def _abort(self, ended: list[Parked], completed: bool, idle: Callable[[], bool]) -> None:
        with suppress(RuntimeError):  # if the GPU has failed NCCL still ends its host side
            self._use_gpu()
        pause = Pause()
        while not ((completed or all(each.unused() for each in ended)) and idle()):
            pause()
        nccl = load_nccl()
        together = nccl.get_version() >= _IN_A_GROUP
        if together:
            nccl.groupStart()
        # Outside a group an abort frees at once, but a call on the communicator may never end.
        for each in sorted(ended, key=lambda parked: parked.user is not None):
            if not together:
                _join(each.user)
            with suppress(Exception):  # one that has failed needs no abort
                each.communicator.abort()
        if together:
            # Their calls end now; the end of the group frees the communicators.
            for each in ended:
                _join(each.user)
            with suppress(Exception):
                nccl.groupEnd()


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread (RuntimeError if there may be no more); at the interpreter's end runs it."""
    try:
        thread.start()
    except RuntimeError as error:
        # Only the text shows it: sys.is_finalizing() is not true yet.
        if "interpreter shutdown" not in str(error):
            raise
        # No thread can be started from then on: Python 3.12, "What's New".
        thread.run()


def _join(thread: threading.Thread | None, seconds: float | None = None) -> None:
    if thread is not None and thread is not threading.current_thread() and thread.is_alive():
        thread.join(None if seconds is None else max(0.0, seconds))


def _failed(what: str) -> str:
    return (
        f"a collective needs a GPU that works, and CUDA says {what}. What this process has on the "
        "GPU may be lost."
    )
