"""FAKE cupy.cuda: streams, events and devices over a queue in this process."""

from __future__ import annotations

from cupy.cuda import nccl, runtime
from cupy.cuda._memory import MemoryPointer, UnownedMemory
from cupy.cuda._queue import Event, Stream, current


class Device:
    def __init__(self, number):
        assert number == 0, "the fake has one GPU"

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
