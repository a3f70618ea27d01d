"""Results that another library takes over: their memory is used again when nobody reads it.

cupy hands freed memory out at once, since its own work comes after in the same stream. Another
library drops an array while its kernels still read it, on streams that cupy knows nothing of. So
what comes back waits, in a thread, until the GPU is through with all that it had been given.

Source: cupy 14, ``cupy/cuda/memory.pyx`` (an arena for each stream); CUDA runtime API,
cudaDeviceSynchronize, the one wait that covers streams which are not known. It is refused while a
stream is captured for a graph, and the capture fails: CUDA programming guide, "Prohibited and
Unhandled Operations". So fails one that begins soon after an array has come back.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from allranks.collectives.calls.wait import Pause
from allranks.collectives.gpu import api

_returned: SimpleQueue[Any] = SimpleQueue()
"""Arrays that came back, and events to set once they are free; a finalizer may put to it."""
_started = threading.Lock()
_CAPTURING = range(900, 908)
"""cudaErrorStreamCaptureUnsupported to cudaErrorCapturedEvent."""


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
        # While the interpreter ends no thread can be started: what comes back then is kept.
        with suppress(RuntimeError):
            threading.Thread(target=_take_back, name="allranks-gpu-memory", daemon=True).start()
    cupy = api.installed()
    memory = cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, _Loan(array), array.device.id)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))


def settled(seconds: float) -> bool:
    """Whether all that has come back by now is free; waits for it, but no longer than this."""
    if not _started.locked():
        return True
    free = threading.Event()
    _returned.put(free)
    return free.wait(seconds)


def _take_back() -> None:
    while True:
        _free([_returned.get()])


def _free(came: list[Any]) -> None:
    """Drops these arrays, and those that come meanwhile, once nothing reads them any more."""
    while not _returned.empty():
        came.append(_returned.get())
    waiting = [each for each in came if isinstance(each, threading.Event)]
    arrays = [each for each in came if not isinstance(each, threading.Event)]
    if arrays:
        _until_idle(arrays[0].device.id)
    arrays.clear()
    came.clear()
    for event in waiting:
        event.set()


def _until_idle(number: int) -> None:
    """Returns when a GPU has done all that it had been given, or has failed: nothing reads then."""
    cuda, pause, told = api.installed().cuda, Pause(), False
    while True:
        try:
            cuda.Device(number).use()
            cuda.runtime.deviceSynchronize()
        except RuntimeError as error:
            if getattr(error, "status", None) not in _CAPTURING:
                return
            if not told:
                told = True
                with suppress(RuntimeWarning):  # where warnings are errors
                    warnings.warn(
                        "a result of a collective was dropped while a CUDA graph was captured, and "
                        f"CUDA ends the capture ({error}). Keep such results until it has ended.",
                        RuntimeWarning,
                        stacklevel=1,
                    )
            pause()
        else:
            return
