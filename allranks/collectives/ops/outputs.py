"""The array that a caller passes for the result of an `allreduce`.

A transport writes to it where it can: then a loop of calls allocates no memory for results.
Otherwise the result is copied to it at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from allranks.collectives.arrays.libraries import (
    WRITABLE,
    address_of,
    described,
    library_of,
    to_numpy,
    write,
)
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
        expected, found = described(array), described(out)
        if not (isinstance(out, np.ndarray) or library_of(out) in WRITABLE):
            raise UsageError(
                f"{kind} needs an out of numpy, {' or '.join(WRITABLE)}: found {found}. Leave out= "
                "out: the result is then a new array."
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
        return found if address_of(found) == address_of(out) else None

    def copied(self, result: Any) -> None:
        """Writes a result, of the kind of the array, to it."""
        write(result, self.array)


def _overlap(one: Any, other: Any) -> bool:
    """Whether two contiguous arrays have bytes in common."""
    at, beside = address_of(one), address_of(other)
    return bool(at < beside + other.nbytes and beside < at + one.nbytes)
