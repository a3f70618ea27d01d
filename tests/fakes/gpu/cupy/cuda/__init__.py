"""FAKE cupy.cuda: streams, events and devices over a queue in this process."""

from __future__ import annotations

from cupy.cuda import nccl, runtime
from cupy.cuda._memory import MemoryPointer, UnownedMemory
from cupy.cuda._queue import Event, Stream, current, use


class Device:
    """Entered it makes no context: 0 is a new thread's current GPU, and cudaSetDevice is left out.

    Source: cupy 14, cupy/cuda/device.pyx, Device.__enter__ and Device.use.
    """

    def __init__(self, number):
        assert number == 0, "the fake has one GPU"

    def use(self):
        use()

    def __enter__(self):
        return self

    def __exit__(self, *details):
        return None


def get_current_stream():
    return current()


__all__ = [
    "Device",
    "Event",
    "MemoryPointer",
    "Stream",
    "UnownedMemory",
    "get_current_stream",
    "nccl",
    "runtime",
]
