"""The array that a caller passes for the result of an `allreduce`.

A transport writes to it where it can: then a loop of calls allocates no memory for results.
Otherwise the result is copied to it at the end.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from allranks.collectives.arrays.libraries import HOST_TYPES, library_of, to_numpy
from allranks.collectives.arrays.reductions import Array
from allranks.collectives.gpu import dlpack
from allranks.collectives.gpu.device import Device
from allranks.collectives.ops.inputs import CollectiveInputs
from allranks.errors import UsageError


def fits(out: Any, array: Array) -> bool:
    """Whether a transport can write the result of a numpy array to ``out``; a quick look."""
    return (
        type(out) is np.ndarray
        and out.dtype == array.dtype
        and out.shape == array.shape
        and out.flags.carray
        and out.dtype.isnative
        and (out is array or not np.may_share_memory(out, array))
    )


def fits_on_gpu(out: Any, array: Any, gpu: Device) -> bool:
    """As `fits`, for a contiguous array of cupy on this rank's GPU."""
    if out is array:
        return True
    if not gpu.has(out) or out.dtype != array.dtype or out.shape != array.shape:
        return False
    at, other = out.data.ptr, array.data.ptr
    return bool(at + out.nbytes <= other or other + array.nbytes <= at)


class GivenArray:
    """The caller's array ``out`` for the result of ``array``."""

    def __init__(self, kind: str, array: Any, out: Any) -> None:
        expected, found = _described(array), _described(out)
        if not (isinstance(out, np.ndarray) or library_of(out) in ("cupy", "torch")):
            raise UsageError(
                f"{kind} needs an out of numpy, cupy or torch: found {found}. Leave out= out: the "
                "result is then a new array."
            )
        if found != expected:
            raise UsageError(
                f"{kind} needs an out of the kind, dtype, shape and device of its array: expected "
                f"{expected}, found {found}. Leave out= out, or pass an array like the first one."
            )
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise UsageError(
                f"{kind} needs an out that can be written: found a read-only array. Pass a copy "
                "of it: out=y.copy()."
            )
        self._kind, self.array, self._in_place = kind, out, out is array

    def memory(self, inputs: CollectiveInputs) -> Array | None:
        """Its memory, as a transport writes to it; None if the result has to be `copied`. Replaces
        the source by it if they are one array.
        """
        found = self._seen(on_gpu=bool(inputs.device))
        if found is None or not found.flags.c_contiguous:
            return None
        if self._in_place:
            inputs.sources[0] = found
        elif _overlap(found, inputs.sources[0]):
            raise UsageError(
                f"{self._kind} needs an out beside its array, or the array itself: found one that "
                f"overlaps it. Type: {self._kind}(x, out=x), or pass other memory."
            )
        return found

    def _seen(self, *, on_gpu: bool) -> Array | None:
        """The same memory as an array of numpy or cupy; None if that would be a copy."""
        out = self.array
        if isinstance(out, np.ndarray):
            plain = not on_gpu and out.flags.carray and out.dtype.isnative
            return to_numpy(out)[0] if plain else None
        if dlpack.is_on_gpu(out) is not on_gpu:
            return None
        found = (dlpack.to_cupy if on_gpu else to_numpy)(out)[0]
        address = out.data_ptr() if library_of(out) == "torch" else out.data.ptr
        return found if _address(found) == address else None

    def copied(self, result: Any) -> None:
        """Writes a result, of the kind of the array, to it."""
        if library_of(self.array) == "torch":
            with sys.modules["torch"].no_grad():
                self.array.copy_(result)
        elif isinstance(self.array, np.ndarray):
            np.copyto(self.array, result)
        else:
            with self.array.device:
                np.copyto(self.array, result)


def _described(value: Any) -> str:
    """An array's kind, dtype, shape and device."""
    name = library_of(value)
    if isinstance(value, HOST_TYPES):
        value = np.asarray(value)
        return f"a numpy array of {value.dtype} {value.shape}"
    if name == "torch":
        return f"a tensor of {value.dtype} {tuple(value.shape)} on {value.device}"
    if name == "cupy":
        return f"a cupy array of {value.dtype} {value.shape} on GPU {int(value.device.id)}"
    return f"{type(value).__module__.partition('.')[0]}'s {type(value).__name__}"


def _address(array: Any) -> int:
    if isinstance(array, np.ndarray):
        found: int = array.__array_interface__["data"][0]
        return found
    return int(array.data.ptr)


def _overlap(one: Any, other: Any) -> bool:
    """Whether two contiguous arrays have bytes in common."""
    at, beside = _address(one), _address(other)
    return bool(at < beside + other.nbytes and beside < at + one.nbytes)
