"""Other libraries' arrays as numpy's, and back; results in them, and operations of theirs.

None of the libraries is imported unless an array of it was passed.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.arrays.reductions import Array, Average, Product, ReduceOp, Sum, name_of
from allranks.errors import MissingDependency

# Made here, because a cell may replace the functions of json.
_dumps = json.JSONEncoder().encode
_loads = json.JSONDecoder().decode


class ArrayHeader(NamedTuple):
    """An array's dtype, shape and place, sent before its bytes."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = ""

    def pack(self, width: int = 0) -> NDArray[np.uint8]:
        return np.frombuffer(_dumps(self).encode().ljust(width), np.uint8)

    @classmethod
    def unpack(cls, data: NDArray[np.uint8]) -> ArrayHeader:
        dtype, shape, device = _loads(data.tobytes().decode())
        return cls(dtype, tuple(shape), device)


Restore = Callable[[Array], Any]
_DLPACK_CUDA = 2
HOST_TYPES = (np.ndarray, np.generic, bool, int, float, complex, list, tuple)
"""Types of values that are always in host memory."""


def to_numpy(value: Any) -> tuple[Array, Restore]:
    """A value as a C-contiguous numpy array in native byte order, and the conversion of results to
    the value's library and device. The conversion takes over the result's memory. CPU arrays are
    not copied. A Python number comes back as a number, a list as a numpy array.
    """
    if type(value) is np.ndarray:
        return _plain(value), _same
    if isinstance(value, np.generic):
        return np.asarray(value), lambda out: out[()] if out.ndim == 0 else out
    if isinstance(value, (bool, int, float, complex)):
        return np.asarray(value), lambda out: out.item() if out.ndim == 0 else out
    if hasattr(value, "dtype"):
        special = _LIBRARIES.get(library_of(value))
        if special is not None:
            return special(value)
    if hasattr(value, "__array_namespace__") and not isinstance(value, np.ndarray):
        return _standard(value)
    if hasattr(value, "__cuda_array_interface__"):
        return _cupy(_import("cupy").asarray(value))
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return _dlpack(value)
    if isinstance(value, np.ma.MaskedArray) or _has_masked(value):
        raise TypeError(
            "a collective needs every value of an array, and this one is masked. "
            "Pass x.filled(0), or x.compressed()."
        )
    if isinstance(value, np.matrix):  # whose * is the product of matrices
        return _plain(value, value), lambda out: out.view(np.matrix)
    try:
        array = np.asarray(value)
    except ValueError as error:
        if not isinstance(value, list | tuple):
            raise
        raise TypeError(
            "a collective needs an array of numbers or bool, found a list whose parts differ in "
            "shape. Send other things with broadcast_object or allgather_object."
        ) from error
    return _plain(array, value), _same


def _has_masked(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(
        isinstance(each, np.ma.MaskedArray) or _has_masked(each) for each in value
    )


_SHOWN = 4


def labels_of(values: Sequence[Any], *, rows: bool = True) -> tuple[str, ...]:
    """The labels of rows and columns of tables of pandas; nothing if there are none.

    A collective moves numbers without their labels, so these have to be the same on every rank.
    """
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(values, list | tuple):
        return ()
    found = tuple(
        "; ".join(filter(None, (_labels(pandas, value, axis) for axis in _AXES[not rows :])))
        for value in values
    )
    return found if any(found) else ()


_AXES = "index", "columns"


def _labels(pandas: Any, value: Any, name: str) -> str:
    axis = getattr(value, name, None)
    # The numbers from 0 on are the places themselves; those of a part or of a reversed table not.
    if not isinstance(axis, pandas.Index) or axis.equals(pandas.RangeIndex(len(axis))):
        return ""
    texts = [*map(str, axis)]
    rest = f" … ({zlib.crc32(repr(texts).encode()):x})" if len(texts) > _SHOWN else ""
    return f"{name} {', '.join(texts[:_SHOWN])}{rest}"


def library_of(value: Any) -> str:
    # Subclasses of a library's class may be defined elsewhere.
    for base in type(value).__mro__:
        name = base.__module__.partition(".")[0]
        if name in _LIBRARIES:
            return name
    return ""


WRITABLE = ("cupy", "torch")
"""The libraries beside numpy to whose arrays a result can be written."""


def address_of(array: Any) -> int:
    """The address of the memory of an array of numpy or of a library in `WRITABLE`."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data_ptr() if library_of(array) == "torch" else array.data.ptr)


def write(result: Any, out: Any) -> None:
    """Copies a result to an array of its library, shape and device."""
    if library_of(out) == "torch":
        with sys.modules["torch"].no_grad():
            out.copy_(result)
    elif isinstance(out, np.ndarray):
        np.copyto(out, result)
    else:
        with out.device:
            np.copyto(out, result)


def described(value: Any) -> str:
    """An array's library, dtype, shape and device, for errors."""
    name = library_of(value)
    if isinstance(value, HOST_TYPES):
        value = np.asarray(value)
        return f"a numpy array of {value.dtype} {value.shape}"
    if name == "torch":
        return f"a tensor of {value.dtype} {tuple(value.shape)} on {value.device}"
    if name == "cupy":
        return f"a cupy array of {value.dtype} {value.shape} on GPU {int(value.device.id)}"
    return f"{type(value).__module__.partition('.')[0]}'s {type(value).__name__}"


_OF_MPI = {"SUM": Sum, "PROD": Product, "MIN": ReduceOp.Min, "MAX": ReduceOp.Max}
_OF_TORCH = {
    "SUM": Sum,
    "AVG": Average,
    "PRODUCT": Product,
    "MIN": ReduceOp.Min,
    "MAX": ReduceOp.Max,
}


def reduction_of(op: Any) -> ReduceOp | None:
    """The reduction that a number or an operation of mpi4py or torch means, or None.

    Operations of other libraries have other numbers: torch's SUM is 0, which is Average here.
    """
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, int | np.integer) and not isinstance(op, bool):
        return ReduceOp(int(op)) if op in [*ReduceOp] else None
    if type(op).__module__.startswith("torch."):
        # ReduceOp.SUM has a name. ReduceOp(ReduceOp.SUM) has it in an attribute.
        return _OF_TORCH.get(getattr(getattr(op, "op", op), "name", ""))
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None or not isinstance(op, MPI.Op):
        return None
    return next((ours for name, ours in _OF_MPI.items() if op == getattr(MPI, name)), None)


def to_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(bfloat16() if name == "bfloat16" else name)


def _same(out: Array) -> Array:
    return out


def _own(out: Array) -> Array:
    """A result whose memory another library may write to."""
    return out if out.flags.writeable else out.copy()


def _plain(array: Array, value: Any = None) -> Array:
    if value is not None and array.dtype == object:
        raise TypeError(
            f"a collective needs an array of numbers or bool, found {type(value).__name__}. "
            "Send other things with broadcast_object or allgather_object."
        )
    array = np.asarray(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # mpi4py maps no unaligned dtype.
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()


def _dlpack(value: Any) -> tuple[Array, Restore]:
    if value.__dlpack_device__()[0] == _DLPACK_CUDA:
        return _cupy(_import("cupy").from_dlpack(value))
    return _plain(np.from_dlpack(value)), _same


def _standard(value: Any) -> tuple[Array, Restore]:
    """An array of any library that follows the array API standard."""
    namespace, device = value.__array_namespace__(), value.device

    def restore(out: Array) -> Any:
        array = namespace.from_dlpack(_own(out))
        return array if array.device == device else array.to_device(device)

    return _dlpack(value)[0], restore


def _torch(value: Any) -> tuple[Array, Restore]:
    from allranks.collectives.arrays import torch_memory

    torch = sys.modules["torch"]
    device, layout = value.device, value.layout
    if layout != torch.strided:
        raise TypeError(
            f"a collective needs a dense tensor, and this one is {layout}. Pass x.to_dense()."
        )

    def restore(out: Array) -> Any:
        out = _own(out)
        if name_of(out.dtype) == "bfloat16":
            return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(out).to(device)

    tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return torch_memory.array_of(tensor.view(torch.int16)).view(bfloat16()), restore
    return _plain(torch_memory.array_of(tensor)), restore


def _tensorflow(value: Any) -> tuple[Array, Restore]:
    tensorflow = sys.modules["tensorflow"]

    def restore(out: Array) -> Any:
        with tensorflow.device(value.device):
            return tensorflow.convert_to_tensor(out)

    # For a bfloat16 without dimensions numpy() returns a number, and __array__() fails.
    lone = value.dtype == tensorflow.bfloat16 and value.shape.rank == 0
    # Not by DLPack: a tensor of strings aborts the process there.
    return _plain(np.asarray(value.numpy() if lone else value), value), restore


def _cupy(value: Any) -> tuple[Array, Restore]:
    cupy = sys.modules["cupy"]

    def restore(out: Array) -> Any:
        with value.device:
            return cupy.asarray(out)

    return _plain(cupy.asnumpy(value)), restore


def _jax(value: Any) -> tuple[Array, Restore]:
    jax = sys.modules["jax"]
    source, sharding = _plain(np.asarray(value)), value.sharding

    def restore(out: Array) -> Any:
        _check_jax_width(jax, out)
        try:
            sharding.shard_shape(out.shape)
        except ValueError:
            # A result whose shape does not divide among the devices.
            return jax.device_put(out, min(sharding.device_set, key=lambda device: device.id))
        return jax.device_put(out, sharding)

    return source, restore


def _check_jax_width(jax: Any, out: Array) -> None:
    """Raises for integers of 64 bits that jax would cut to others of 32."""
    if out.dtype.kind not in "iu" or jax.config.jax_enable_x64 or out.itemsize < 8:
        return
    limits = np.iinfo(f"{out.dtype.kind}4")
    if out.size and (out.max() > limits.max or out.min() < limits.min):
        raise TypeError(
            f"an array of jax has integers of 32 bits here: found {out.dtype} up to {out.max()}. "
            "Type before all else: jax.config.update('jax_enable_x64', True), or receive into an "
            "array of numpy."
        )


def bfloat16() -> Any:
    # numpy has no bfloat16.
    return _import("ml_dtypes").bfloat16


_NEEDED = {
    "cupy": (
        "arrays on a GPU",
        "pip install 'allranks[cuda12]', or 'allranks[cuda13]' for CUDA 13",
    ),
    "ml_dtypes": ("bfloat16 arrays", "pip install ml_dtypes"),
}


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        what, install = _NEEDED[name]
        raise MissingDependency(
            f"{what} need the package {name} on every rank. {install}"
        ) from error


_LIBRARIES: dict[str, Callable[[Any], tuple[Array, Restore]]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "cupy": _cupy,
    "jax": _jax,
    "jaxlib": _jax,
}
