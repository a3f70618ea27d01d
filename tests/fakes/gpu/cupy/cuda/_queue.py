"""FAKE streams: work is queued, and done a piece at a time while somebody asks for an event."""

from __future__ import annotations

import itertools
import random
import time
import weakref
from collections import deque

_numbers = itertools.count(1000)
_streams: dict[int, Stream] = {}
_events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
_stack: list[Stream] = []
_chance = random.Random(7)


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.ptr = next(_numbers)
        self.done_at = None
        self.timed = not disable_timing
        _events[self.ptr] = self

    def record(self, stream=None):
        def happen():
            self.done_at = time.perf_counter()

        (stream or null)._work.append(happen)


class Stream:
    def __init__(self, null=False, non_blocking=False):
        self.ptr = 0 if null else next(_numbers)
        self._work = deque()
        _streams[self.ptr] = self

    def wait_event(self, event):
        self._work.append(lambda: event.done_at is not None or _AGAIN)

    def __enter__(self):
        _stack.append(self)
        return self

    def __exit__(self, *details):
        assert _stack.pop() is self

    def _step(self):
        """Does one piece; whether there was one that could be done."""
        if not self._work:
            return False
        if self._work[0]() is _AGAIN:
            return False
        self._work.popleft()
        return True


_AGAIN = object()
"""What a piece of work returns that cannot be done yet."""
null = Stream(null=True)


def current():
    return _stack[-1] if _stack else null


def push(work, stream=None):
    """Queues work on a stream, by default the current one."""
    (stream or current())._work.append(work)


def stream_of(pointer):
    return _streams[pointer]


def progress():
    """Does a few pieces, of streams taken at random."""
    for _ in range(4):
        streams = [stream for stream in _streams.values() if stream._work]
        _chance.shuffle(streams)
        if not any(stream._step() for stream in streams):
            return


def finish():
    """Does all that the current stream holds, and what it waits for."""
    end = time.monotonic() + 20
    while current()._work:
        if not any(stream._step() for stream in list(_streams.values())):
            if time.monotonic() > end:
                raise RuntimeError("the current stream does not end: somebody waits for ever")
            time.sleep(1e-4)


def drop(owner):
    """Takes what a communicator has queued out of all streams: its kernels have been ended."""
    for stream in _streams.values():
        kept = [work for work in stream._work if getattr(work, "owner", None) is not owner]
        stream._work = deque(kept)
