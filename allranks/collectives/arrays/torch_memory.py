"""The memory of torch's tensors as numpy's arrays, without a copy. This module imports torch.

``tensor.numpy()`` forbids for ever to resize the storage of the tensor, which FSDP does at each
step. Tensors that are handed over by DLPack, or by numpy's array interface, stay resizable.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from allranks.collectives.arrays.reductions import Array

_PLAIN = torch.Tensor, torch.nn.Parameter
_HOST = 1, 0
"""DLPack's name of host memory."""
_export: Any = getattr(torch._C, "_to_dlpack_versioned", None)


class _ByDlpack:
    """As fast as ``tensor.numpy()``: torch's own ``__dlpack__`` takes four times as long."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return _export(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _HOST


class _ByInterface:
    """For numpy before 2.1, which makes read-only arrays from DLPack, and for older torch."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        dtype = _numpy_dtype(tensor.dtype)
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(dtype.itemsize * stride for stride in tensor.stride()),
            "typestr": dtype.str,
            "version": 3,
        }


@cache
def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))


def _writes_by_dlpack() -> bool:
    try:
        return np.from_dlpack(_ByDlpack(torch.zeros(1))).flags.writeable
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return False


_read: Any
_read, _handed_over = (
    (np.from_dlpack, _ByDlpack) if _writes_by_dlpack() else (np.asarray, _ByInterface)
)


def array_of(tensor: Any) -> Array:
    """The memory of a tensor of a dtype that numpy has.

    Raises:
        BufferError, RuntimeError, TypeError: it cannot be used as it is.
    """
    if type(tensor) not in _PLAIN:
        found: Array = tensor.numpy()  # a subclass may have no memory of its own
        return found
    if not tensor.is_cpu or tensor.is_neg() or tensor.is_conj():
        raise TypeError("numpy needs a tensor in host memory, without pending operations.")
    array: Array = _read(_handed_over(tensor))
    return array


def as_bytes(tensor: Any) -> Any:
    """The memory of a contiguous tensor as a tensor of bytes."""
    # A lone element of a column is contiguous, with a step that torch does not view as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
