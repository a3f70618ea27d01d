"""FAKE memory pool: what is freed on a stream is handed out on it again, at once.

Source: cupy 14, cupy/cuda/memory.pyx, SingleDeviceMemoryPool: an arena for each stream, and no
wait before a block is used again. Blocks begin on a boundary of ALLOCATION_UNIT_SIZE.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from cupy.cuda import _queue

_UNIT = 512
_free: defaultdict[tuple[int, int], list[np.ndarray]] = defaultdict(list)


class _Block:
    """Memory that goes back when the last array over it does."""

    def __init__(self, nbytes):
        self._arena = _free[_queue.current().ptr, nbytes]
        self._memory = self._arena.pop() if self._arena else _fresh(nbytes)
        self.__array_interface__ = self._memory.__array_interface__

    def __del__(self):
        self._arena.append(self._memory)


def _fresh(nbytes):
    room = np.empty(nbytes + _UNIT, np.uint8)
    start = -room.ctypes.data % _UNIT
    return room[start : start + nbytes]


def pooled(shape, dtype, rubbish):
    count = int(np.prod(shape))
    if not count:
        return np.empty(shape, dtype)
    block = _Block(count * dtype.itemsize)
    block._memory.view(dtype)[:] = rubbish
    return np.asarray(block).view(dtype).reshape(shape)


class MemoryPool:
    """Its limit, which limits nothing here."""

    def __init__(self):
        self._limit = 0

    def get_limit(self):
        return self._limit

    def set_limit(self, size=None, fraction=None):
        self._limit = size or 0

    def free_all_blocks(self, stream=None):
        _free.clear()


pool = MemoryPool()


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self.owner = ptr, size, owner


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset


class _Borrowed:
    """Somebody else's memory, whose owner is held as long as an array is over it."""

    def __init__(self, pointer, nbytes):
        self._held = pointer
        self.__array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer.ptr, False), "version": 3
        }  # fmt: skip


def over(shape, dtype, pointer):
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.asarray(_Borrowed(pointer, nbytes)).view(dtype).reshape(shape)
