"""Arrays of any library that lie on a GPU, as cupy's, and back: by DLPack, without a copy.

None of the libraries is imported unless an array of it was passed.

Source: DLPack's Python specification, for which stream waits for which: the producer is told the
consumer's stream and makes that one wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from allranks.collectives.arrays.libraries import Restore, bfloat16, library_of
from allranks.collectives.arrays.reductions import Array, name_of
from allranks.collectives.gpu import api
from allranks.collectives.gpu.lending import lent
from allranks.errors import MissingDependency

_CUDA = (2, 13)
"""DLPack's numbers for memory of a GPU, and for memory that CUDA moves by itself."""
ALIGNED = 256
"""Bytes: what JAX and TensorFlow ask of memory that they take over."""


def is_on_gpu(value: Any) -> bool:
    """True for an array on one GPU that can be passed without a copy.

    Not for what only lies there in part (JAX arrays of several devices), and not for what DLPack
    cannot carry (TensorFlow's bool and complex): these go through the host.
    """
    if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex, list, tuple)):
        return False
    name = library_of(value)
    if name:
        return _KINDS[name][0](value)
    if hasattr(value, "__cuda_array_interface__"):
        return True
    return _dlpack_on_gpu(value)


def take(value: Any) -> tuple[Array, Restore]:
    """An array that is on a GPU as a C-contiguous cupy array, and the way back.

    The result takes over what the way back is given: nothing is copied, but where memory is not
    aligned as JAX and TensorFlow ask for.
    """
    cupy = api.installed()
    name = library_of(value)
    source, restore = _KINDS[name][1](value) if name else _standard(value)
    if not source.flags.c_contiguous:
        source = cupy.ascontiguousarray(source).reshape(source.shape)
    return source, restore


def upload(source: Array) -> tuple[Array, Restore]:
    """A numpy array on the GPU, and the way back to numpy."""
    cupy = api.load()
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
        return False  # within jax.jit there is no array yet, and JAX says so later
    found = list(devices())
    return len(found) == 1 and found[0].platform in ("gpu", "cuda")


def _tensorflow_on_gpu(value: Any) -> bool:
    tensorflow = sys.modules["tensorflow"]
    if isinstance(value, tensorflow.Variable):
        value = tensorflow.convert_to_tensor(value)
    # Its device may be a GPU, and its memory the host's all the same, as int32's is.
    if "GPU" not in str(getattr(value, "backing_device", "")):
        return False
    return bool(value.dtype.is_floating or value.dtype.is_integer)


def _cupy(value: Any) -> tuple[Array, Restore]:
    return value, lambda out: out


def _torch(value: Any) -> tuple[Array, Restore]:
    torch, cupy = sys.modules["torch"], api.installed()
    tensor = value.detach().resolve_conj().resolve_neg().contiguous()

    def restore(out: Array) -> Any:
        if name_of(out.dtype) == "bfloat16":
            return torch.from_dlpack(lent(out.view(np.int16))).view(torch.bfloat16)
        return torch.from_dlpack(lent(out))

    if tensor.dtype == torch.bfloat16:
        found: Array = cupy.from_dlpack(tensor.view(torch.int16)).view(bfloat16())
        return found, restore
    return cupy.from_dlpack(tensor), restore


def _jax(value: Any) -> tuple[Array, Restore]:
    jax = sys.modules["jax"]

    def restore(out: Array) -> Any:
        return jax.dlpack.from_dlpack(lent(aligned(out)))

    return api.installed().from_dlpack(value), restore


def _tensorflow(value: Any) -> tuple[Array, Restore]:
    tensorflow = sys.modules["tensorflow"]
    dlpack = tensorflow.experimental.dlpack
    tensor = tensorflow.convert_to_tensor(value)

    def restore(out: Array) -> Any:
        # TensorFlow knows nothing of streams here: see `reads_at_once`.
        return dlpack.from_dlpack(lent(out).__dlpack__(stream=-1))

    # Given the tensor itself, cupy names a stream, which TensorFlow refuses; not so a capsule.
    return api.installed().from_dlpack(dlpack.to_dlpack(tensor)), restore


def _standard(value: Any) -> tuple[Array, Restore]:
    """Any other library's: back by its own ``from_dlpack``, or as cupy's."""
    cupy = api.installed()
    namespace = getattr(value, "__array_namespace__", None)
    source = cupy.from_dlpack(value) if _dlpack_on_gpu(value) else cupy.asarray(value)
    if namespace is None:
        return source, lambda out: out
    return source, lambda out: namespace().from_dlpack(lent(out))


def aligned(out: Any) -> Any:
    """The same where JAX and TensorFlow take it over: a copy, if it does not lie so."""
    return out if out.data.ptr % ALIGNED == 0 else out.copy()


def reads_at_once(value: Any) -> bool:
    """Whether a result that becomes what this is has to be `aligned`, and there by then."""
    return library_of(value) == "tensorflow"


_KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], tuple[Array, Restore]]]] = {
    "cupy": (lambda value: True, _cupy),
    "torch": (_torch_on_gpu, _torch),
    "jax": (_jax_on_gpu, _jax),
    "jaxlib": (_jax_on_gpu, _jax),
    "tensorflow": (_tensorflow_on_gpu, _tensorflow),
}
"""For each library whether an array of it is on a GPU, and how it is taken."""


def without_cupy(value: Any) -> bool:
    """True where an array on a GPU has to go through the host because there is no cupy."""
    if library_of(value) in ("torch", "jax", "jaxlib", "tensorflow"):
        try:
            api.installed()
        except MissingDependency:
            return True
    return False
