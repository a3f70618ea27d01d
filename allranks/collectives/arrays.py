"""Other libraries' arrays as numpy's, and back. Runs in every rank.

None of the libraries is imported unless an array of it was passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Restore = Callable[[Array], Any]


def to_numpy(value: Any) -> tuple[Array, Restore]:
    """A value as a C-contiguous numpy array in native byte order, and the way back.

    The way back makes, of a result, the kind that the value was: library, device and, where the
    value was a Python number, a number. CPU arrays are not copied on their way here.
    """
    if type(value) is np.ndarray:
        return _plain(value), _same
    if isinstance(value, np.generic):
        return np.asarray(value), lambda out: out[()] if out.ndim == 0 else out
    if isinstance(value, (bool, int, float, complex)):
        return np.asarray(value), lambda out: out.item() if out.ndim == 0 else out
    library = type(value).__module__.partition(".")[0]
    special = _LIBRARIES.get(library)
    if special is not None:
        return special(value)
    if hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
        return _plain(np.asarray(value)), _same
    if hasattr(value, "__dlpack__"):
        return _plain(np.from_dlpack(value)), _namespace(value)
    return _plain(np.asarray(value)), _same


def to_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name, bfloat16 included."""
    return np.dtype(_bfloat16() if name == "bfloat16" else name)


def _same(out: Array) -> Array:
    return out


def _plain(array: Array) -> Array:
    array = np.asarray(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape)


def _namespace(value: Any) -> Restore:
    get = getattr(value, "__array_namespace__", None)
    if get is None:
        return _same
    return lambda out: get().from_dlpack(out)


def _torch(value: Any) -> tuple[Array, Restore]:
    torch = sys.modules["torch"]
    tensor, device, dtype = value.detach().cpu().contiguous(), value.device, value.dtype
    if dtype != torch.bfloat16:
        return _plain(tensor.numpy()), lambda out: torch.from_numpy(np.array(out)).to(device)
    bfloat16 = _bfloat16()

    def restore(out: Array) -> Any:
        bits = torch.from_numpy(np.ascontiguousarray(out).view(np.int16).reshape(out.shape))
        return bits.view(torch.bfloat16).to(device)

    return tensor.view(torch.int16).numpy().view(bfloat16), restore


def _tensorflow(value: Any) -> tuple[Array, Restore]:
    tensorflow = sys.modules["tensorflow"]

    def restore(out: Array) -> Any:
        with tensorflow.device(value.device):
            return tensorflow.convert_to_tensor(out)

    return _plain(np.asarray(value)), restore


def _cupy(value: Any) -> tuple[Array, Restore]:
    cupy = sys.modules["cupy"]

    def restore(out: Array) -> Any:
        with value.device:
            return cupy.asarray(out)

    return _plain(cupy.asnumpy(value)), restore


def _jax(value: Any) -> tuple[Array, Restore]:
    jax = sys.modules["jax"]
    return _plain(np.asarray(value)), lambda out: jax.device_put(out, value.sharding)


def _bfloat16() -> Any:
    from allranks.errors import MissingDependency

    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependency(
            "bfloat16 arrays need the package ml_dtypes on every rank. pip install ml_dtypes"
        ) from error
    return ml_dtypes.bfloat16


_LIBRARIES: dict[str, Callable[[Any], tuple[Array, Restore]]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "cupy": _cupy,
    "jax": _jax,
    "jaxlib": _jax,
}
