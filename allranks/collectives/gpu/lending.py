"""Results that another library takes over: their memory is used again when nobody reads it.

cupy hands freed memory out at once, since its own work comes after in the same stream. Another
library drops an array while its kernels still read it, on streams that cupy knows nothing of. So
what comes back waits, in a thread, until the GPU is through with all that it had been given.

Source: cupy 14, ``cupy/cuda/memory.pyx`` (an arena for each stream); CUDA runtime API,
cudaDeviceSynchronize, the one wait that covers streams which are not known.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from allranks.collectives.gpu import api

_returned: SimpleQueue[Any] = SimpleQueue()
"""Arrays that came back; this queue may be put to in a finalizer."""
_started = threading.Lock()


class _Loan:
    """Owns an array for as long as another library has it."""

    __slots__ = ("_array",)

    def __init__(self, array: Any) -> None:
        self._array = array

    def __del__(self) -> None:
        _returned.put(self._array)


def lent(array: Any) -> Any:
    """The same contiguous array for another library."""
    if not array.nbytes:
        return array
    if _started.acquire(blocking=False):
        threading.Thread(target=_take_back, name="allranks-gpu-memory", daemon=True).start()
    cupy = api.installed()
    memory = cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, _Loan(array), array.device.id)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))


def _take_back() -> None:
    cupy = api.installed()
    while True:
        came = [_returned.get()]
        while not _returned.empty():
            came.append(_returned.get())
        # Where the GPU has failed nothing reads any more.
        with suppress(RuntimeError), cupy.cuda.Device(came[0].device.id):
            cupy.cuda.runtime.deviceSynchronize()
        came.clear()
