"""FAKE cupy: no GPU. Arrays of numpy's under cupy's names, and a queue of work that is really late.

For the logic of the transports of GPUs where there is no GPU: what runs here says nothing about a
GPU. As with the real one, work is only queued: it is done, one piece of one stream at a time,
while somebody asks for an event. So a result that is read too early is wrong here as well, and a
buffer that is used again too early too. Memory that is freed is what the next array of its size and
stream gets, at once, as the real pool has it (cupy 14, cupy/cuda/memory.pyx). An array refuses to
become numpy's by itself.

Put this folder's parent on PYTHONPATH before anything imports cupy.
"""

from __future__ import annotations

import os

import numpy as np

from cupy import cuda
from cupy._arrays import ndarray
from cupy.cuda import _memory

__version__ = "14.0.fake"
FAKE = True


def empty(shape, dtype=float, order="C"):
    dtype = np.dtype(dtype)
    return ndarray._of(_memory.pooled(shape, dtype, _rubbish(dtype)))


def empty_like(a, dtype=None, order="K", subok=None, shape=None):
    return empty(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)


def zeros_like(a, dtype=None, order="K", subok=None, shape=None):
    out = empty_like(a, dtype, order, subok, shape)
    cuda._queue.push(lambda: out._raw.fill(0))
    return out


def array(obj, dtype=None):
    return ndarray._of(np.array(obj, dtype))


def asarray(a, dtype=None, order=None):
    return a if isinstance(a, ndarray) else ndarray._of(np.array(a, dtype, order=order))


def ascontiguousarray(a):
    return a if a.flags.c_contiguous else a.copy()


def asnumpy(a):
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def from_dlpack(array):
    return array._as_cupy()


def get_default_memory_pool():
    return _memory.pool


def is_available():
    return os.environ.get(cuda.runtime.SEAT) not in cuda.runtime.MISSING


def _rubbish(dtype):
    """What uninitialised memory holds here: nothing that a test would take for a result."""
    return {"b": True, "V": 0}.get(dtype.kind, 77)


__all__ = [
    "FAKE",
    "asarray",
    "ascontiguousarray",
    "asnumpy",
    "cuda",
    "empty",
    "empty_like",
    "from_dlpack",
    "get_default_memory_pool",
    "is_available",
    "ndarray",
    "zeros_like",
]
