"""GPU arrays of other libraries as cupy arrays, and results back to them: DLPack, without a copy.

No library is imported unless an array of it was passed.

cupy reuses freed memory at once, because its own work comes later in the same stream. Another
library may free an array while its kernels still read it, on streams unknown to cupy. So memory
that comes back from another library waits, in a thread, until the GPU has finished all work that
had been queued.

Source: DLPack's Python specification, on streams: the consumer passes its stream to the producer,
which makes that stream wait. cupy 14, ``cupy/cuda/memory.pyx`` (an arena for each stream). CUDA
runtime API, cudaDeviceSynchronize, the one wait that covers unknown streams. It is refused while a
stream is captured for a graph, and the capture fails: CUDA programming guide, "Prohibited and
Unhandled Operations". A capture that begins soon after an array has come back fails too.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np

from allranks.collectives.arrays.libraries import HOST_TYPES, Restore, bfloat16, library_of
from allranks.collectives.arrays.reductions import Array, name_of
from allranks.collectives.calls.call import Pause
from allranks.collectives.gpu import cupy_api
from allranks.errors import MissingDependency

_returned: SimpleQueue[Any] = SimpleQueue()
"""Arrays that came back, and events to set once these are free. A finalizer may put to it."""
_taking_back: list[bool] = []
"""Not empty once a thread frees what has come back."""
_CAPTURING = range(900, 908)
"""cudaErrorStreamCaptureUnsupported to cudaErrorCapturedEvent."""


class DLPackExport:
    """Owns an array while another library uses its memory."""

    __slots__ = ("_array",)

    def __init__(self, array: Any) -> None:
        self._array = array

    def __del__(self) -> None:
        _returned.put(self._array)


def export(array: Any) -> Any:
    """A contiguous array for another library, over the same memory."""
    if not array.nbytes:
        return array
    if not _taking_back:
        # While the interpreter ends no thread can be started: memory that comes back is kept.
        with suppress(RuntimeError):
            threading.Thread(target=_take_back, name="allranks-gpu-memory", daemon=True).start()
        _taking_back.append(True)  # last: an interrupt before it starts a second thread, not none
    cupy = cupy_api.installed()
    memory = cupy.cuda.UnownedMemory(
        array.data.ptr, array.nbytes, DLPackExport(array), array.device.id
    )
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))


def wait_for_exports(seconds: float) -> bool:
    """Whether all memory that has come back is free; waits for that at most this long."""
    if not _taking_back:  # no memory can come back
        return True
    free = threading.Event()
    _returned.put(free)
    return free.wait(seconds)


def _take_back() -> None:
    while True:
        _free([_returned.get()])


def _free(came: list[Any]) -> None:
    """Frees these arrays, and those that come meanwhile, once no kernel reads them."""
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
    """Returns when a GPU has finished all queued work, or has failed: then no kernel reads."""
    cuda, pause, warned = cupy_api.installed().cuda, Pause(), False
    while True:
        try:
            cuda.Device(number).use()
            cuda.runtime.deviceSynchronize()
        except RuntimeError as error:
            if getattr(error, "status", None) not in _CAPTURING:
                return
            if not warned:
                warned = True
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


_CUDA = (2, 13)
"""DLPack's numbers for memory of a GPU, and for managed memory."""
ALIGNED = 256
"""The alignment in bytes that JAX and TensorFlow require of memory from other libraries."""


def is_on_gpu(value: Any) -> bool:
    """True for an array on one GPU that can be passed without a copy."""
    if isinstance(value, HOST_TYPES):
        return False
    name = library_of(value)
    if name:
        # False for JAX arrays of several devices, and for dtypes that DLPack cannot carry
        # (TensorFlow's bool and complex): these go through the host.
        return _KINDS[name][0](value)
    if hasattr(value, "__cuda_array_interface__"):
        return True
    return _dlpack_on_gpu(value)


def to_cupy(value: Any) -> tuple[Array, Restore]:
    """A GPU array as a C-contiguous cupy array, and the function that converts results back. That
    function takes over the memory of its argument. It copies only if the memory is not aligned as
    JAX and TensorFlow require.
    """
    cupy = cupy_api.installed()
    name = library_of(value)
    source, restore = _KINDS[name][1](value) if name else _standard(value)
    if not source.flags.c_contiguous:
        source = cupy.ascontiguousarray(source).reshape(source.shape)
    return source, restore


def upload(source: Array) -> tuple[Array, Restore]:
    cupy = cupy_api.load()
    found: Array = cupy.asarray(source)
    return found, cupy.asnumpy


def _dlpack_on_gpu(value: Any) -> bool:
    device = getattr(value, "__dlpack_device__", None)
    return device is not None and int(device()[0]) in _CUDA


def _torch_on_gpu(value: Any) -> bool:
    torch = sys.modules["torch"]
    if not isinstance(value, torch.Tensor):
        return False
    return bool(value.device.type == "cuda" and value.layout == torch.strided)


def _jax_on_gpu(value: Any) -> bool:
    devices = getattr(value, "devices", None)
    if devices is None or isinstance(value, sys.modules["jax"].core.Tracer):
        return False  # within jax.jit there is no array yet; JAX raises its own error later
    found = list(devices())
    return len(found) == 1 and found[0].platform in ("gpu", "cuda")


def _tensorflow_on_gpu(value: Any) -> bool:
    tensorflow = sys.modules["tensorflow"]
    if isinstance(value, tensorflow.Variable):
        value = tensorflow.convert_to_tensor(value)
    # A tensor of a GPU may still be in host memory, as those of int32 are.
    if "GPU" not in str(getattr(value, "backing_device", "")):
        return False
    return bool(value.dtype.is_floating or value.dtype.is_integer)


def _cupy(value: Any) -> tuple[Array, Restore]:
    return value, lambda out: out


def _torch(value: Any) -> tuple[Array, Restore]:
    torch, cupy = sys.modules["torch"], cupy_api.installed()
    tensor = value.detach().resolve_conj().resolve_neg().contiguous()

    def restore(out: Array) -> Any:
        if name_of(out.dtype) == "bfloat16":
            return torch.from_dlpack(export(out.view(np.int16))).view(torch.bfloat16)
        return torch.from_dlpack(export(out))

    if tensor.dtype == torch.bfloat16:
        found: Array = cupy.from_dlpack(tensor.view(torch.int16)).view(bfloat16())
        return found, restore
    return cupy.from_dlpack(tensor), restore


def _jax(value: Any) -> tuple[Array, Restore]:
    jax = sys.modules["jax"]

    def restore(out: Array) -> Any:
        return jax.dlpack.from_dlpack(export(aligned(out)))

    return cupy_api.installed().from_dlpack(value), restore


def _tensorflow(value: Any) -> tuple[Array, Restore]:
    tensorflow = sys.modules["tensorflow"]
    dlpack = tensorflow.experimental.dlpack
    tensor = tensorflow.convert_to_tensor(value)

    def restore(out: Array) -> Any:
        # TensorFlow ignores streams here: see `reads_at_once`.
        return dlpack.from_dlpack(export(out).__dlpack__(stream=-1))

    # A capsule, because with the tensor itself cupy passes a stream, which TensorFlow refuses.
    return cupy_api.installed().from_dlpack(dlpack.to_dlpack(tensor)), restore


def _standard(value: Any) -> tuple[Array, Restore]:
    """An array of any other library: back by its own ``from_dlpack``, or as a cupy array."""
    cupy = cupy_api.installed()
    namespace = getattr(value, "__array_namespace__", None)
    source = cupy.from_dlpack(value) if _dlpack_on_gpu(value) else cupy.asarray(value)
    if namespace is None:
        return source, lambda out: out
    return source, lambda out: namespace().from_dlpack(export(out))


def aligned(out: Any) -> Any:
    return out if out.data.ptr % ALIGNED == 0 else out.copy()


def reads_at_once(value: Any) -> bool:
    """Whether a result for this kind of array must be `aligned`, and complete when it is passed."""
    return library_of(value) == "tensorflow"


_KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], tuple[Array, Restore]]]] = {
    "cupy": (lambda value: True, _cupy),
    "torch": (_torch_on_gpu, _torch),
    "jax": (_jax_on_gpu, _jax),
    "jaxlib": (_jax_on_gpu, _jax),
    "tensorflow": (_tensorflow_on_gpu, _tensorflow),
}
"""For each library the test whether an array is on a GPU, and the conversion."""


def without_cupy(value: Any) -> bool:
    """True if a GPU array has to go through the host because cupy is missing."""
    if library_of(value) in ("torch", "jax", "jaxlib", "tensorflow"):
        try:
            cupy_api.installed()
        except MissingDependency:
            return True
    return False
