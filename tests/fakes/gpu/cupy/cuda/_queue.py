"""FAKE streams: work is queued, and done a piece at a time while somebody asks for an event."""

from __future__ import annotations

import itertools
import random
import threading
import time
import weakref
from collections import Counter, deque

_numbers = itertools.count(1000)
_streams: dict[int, Stream] = {}
_events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
_chance = random.Random(7)
counted: Counter[str] = Counter()
"""Events that were made, waits for one that have begun, and calls of what copies arrays."""
driver = threading.RLock()
"""Held by a call that waits for the whole GPU: other calls of the process wait for it."""
_lock = threading.RLock()
"""Protects the streams' queues: whoever asks for an event works on them, the main thread or one
that makes or ends NCCL's."""


class _Thread(threading.local):
    """What each thread has of its own: a context, and a current stream.

    Source: CUDA driver API, "Context Management"; cupy 14, cupy/cuda/stream.pyx, _ThreadLocal.
    """

    def __init__(self):
        self.used = threading.current_thread() is threading.main_thread()
        self.streams = []


_thread = _Thread()


def use():
    """The current thread has a context from now on."""
    _thread.used = True


def must_be_used():
    """What NCCL and the driver need of a thread."""
    assert _thread.used, "CUDA_ERROR_INVALID_CONTEXT: no use() in this thread"


class _Mark:
    """Where an event was recorded: what waits for it waits for that, whatever comes later.

    Source: CUDA runtime API, cudaEventRecord. What waits for an event that was never recorded does
    not wait there; here it waits for the first record.
    """

    done_at = None
    asked = False

    def happen(self):
        self.done_at = time.perf_counter()

    def has_happened(self):
        if not self.asked:
            self.asked = True
            counted["wait"] += 1
        return self.done_at is not None


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.ptr = next(_numbers)
        self.mark, self.recorded = _Mark(), False
        self.timed = not disable_timing
        counted["event"] += 1
        _events[self.ptr] = self

    def __del__(self):
        # A broken context fails the destroy too, and cupy raises that: 18 lines for one cell on an
        # H200. CUDA runtime API, cudaEventDestroy.
        from cupy.cuda import runtime

        if runtime.failing:
            raise runtime.CUDARuntimeError(runtime.failing[0])

    def record(self, stream=None):
        if self.recorded:
            self.mark = _Mark()
        self.recorded = True
        with driver:
            (stream or null)._add(self.mark.happen)


class Stream:
    def __init__(self, null=False, non_blocking=False):
        self.ptr = 0 if null else next(_numbers)
        self._work = deque()
        _streams[self.ptr] = self

    @classmethod
    def from_external(cls, obj):
        """One of another library, by the CUDA stream protocol."""
        _, pointer = obj.__cuda_stream__()
        return _streams[pointer]

    def wait_event(self, event):
        mark = event.mark
        self._add(lambda: mark.done_at is not None or _AGAIN)

    def _add(self, work):
        # With the lock: `drop`, in a thread that aborts, puts another queue in the place of this.
        with _lock:
            self._work.append(work)

    def __enter__(self):
        _thread.streams.append(self)
        return self

    def __exit__(self, *details):
        assert _thread.streams.pop() is self

    @property
    def done(self):
        """Whether nothing is queued: cupy 14, cupy/cuda/stream.pyx."""
        progress()
        return not self._work

    def _step(self):
        """Does one piece; whether there was one that could be done."""
        with _lock:
            if not self._work or self._work[0]() is _AGAIN:
                return False
            self._work.popleft()
            return True


_AGAIN = object()
"""What a piece of work returns that cannot be done yet."""
null = Stream(null=True)


def current():
    streams = _thread.streams
    return streams[-1] if streams else null


def push(work, stream=None):
    """Queues work on a stream, by default the current one."""
    (stream or current())._add(work)


def stream_of(pointer):
    return _streams[pointer]


def progress():
    """Does a few pieces, of streams taken at random."""
    for _ in range(4):
        # A copy, because another thread may make a stream meanwhile.
        streams = [stream for stream in list(_streams.values()) if stream._work]
        _chance.shuffle(streams)
        if not any(stream._step() for stream in streams):
            return


def finish():
    """Does all that the current stream holds, and what it waits for."""
    end = time.monotonic() + 60
    while current()._work:
        if not any(stream._step() for stream in list(_streams.values())):
            if time.monotonic() > end:
                raise RuntimeError("the current stream does not end: somebody waits for ever")
            time.sleep(1e-4)


def marks():
    """One behind the work of each stream."""
    found = []
    for stream in list(_streams.values()):
        found.append(_Mark())
        stream._add(found[-1].happen)
    return found


def drop(owner):
    """Takes what a communicator has queued out of all streams: its kernels have been ended."""
    with _lock:
        for stream in list(_streams.values()):
            kept = [work for work in stream._work if getattr(work, "owner", None) is not owner]
            stream._work = deque(kept)


def owners():
    """The communicators whose kernels have not ended."""
    with _lock:
        queued = [work for stream in list(_streams.values()) for work in stream._work]
    return {work.owner for work in queued if hasattr(work, "owner")}
