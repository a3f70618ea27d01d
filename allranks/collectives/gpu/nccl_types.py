"""Our dtypes and reductions as NCCL's.

Source: nccl.h, ncclDataType_t, ncclRedOp_t and ncclResult_t.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.arrays.reductions import ReduceOp, accumulator, is_half, name_of

BYTES = 1
"""ncclUint8."""
IN_PROGRESS = 7
"""ncclInProgress."""
CODES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float32": 7,
    "float64": 8,
}
"""Not float16 (6) and bfloat16 (9): NCCL would sum them in their own precision, and we do not."""
_SUM, _PROD, _MAX, _MIN = 0, 1, 2, 3
_OPS = {
    ReduceOp.Average: _SUM,
    ReduceOp.Sum: _SUM,
    ReduceOp.Product: _PROD,
    ReduceOp.Max: _MAX,
    ReduceOp.Min: _MIN,
}
# As bytes, "any" is the largest and "all" the least.
_BOOL = {ReduceOp.Sum: _MAX, ReduceOp.Max: _MAX, ReduceOp.Min: _MIN, ReduceOp.Product: _MIN}
_WIDER: dict[str, np.dtype[Any]] = {"int16": np.dtype(np.int32), "uint16": np.dtype(np.uint32)}
"""NCCL has no integers of 16 bits. Wider ones give the same, cut back, for every reduction."""
_PARTS: dict[str, np.dtype[Any]] = {
    "complex64": np.dtype(np.float32),
    "complex128": np.dtype(np.float64),
}
"""A sum of complex numbers is two sums."""


class Wire(NamedTuple):
    """How NCCL sees an array."""

    code: int
    op: int
    wider: np.dtype[Any] | None = None
    """What it is converted to first; None where it goes as it is."""
    seen: np.dtype[Any] | None = None
    """The dtype that its memory is seen as; None for its own."""

    def view(self, array: NDArray[Any]) -> Any:
        """A contiguous array of one dimension as NCCL counts it."""
        return array if self.seen is None else array.view(self.seen)


def wire(op: ReduceOp, dtype: np.dtype[Any]) -> Wire | None:
    """How NCCL reduces a dtype with the results that all transports give; None where it cannot."""
    name = name_of(dtype)
    if is_half(dtype) or (dtype.kind == "c" and op is ReduceOp.Product):
        return None
    if dtype.kind == "f" and op in (ReduceOp.Min, ReduceOp.Max):
        # A NaN has to win, and NCCL does not say that it does.
        return None
    if dtype.kind == "b":
        return Wire(BYTES, _BOOL[op], seen=np.dtype(np.uint8))
    total = accumulator(op, dtype)
    if total != dtype:
        return Wire(CODES[total.name], _OPS[op], wider=total)
    if name in _PARTS:
        return Wire(CODES[_PARTS[name].name], _OPS[op], seen=_PARTS[name])
    if name in _WIDER:
        return Wire(CODES[_WIDER[name].name], _OPS[op], wider=_WIDER[name])
    return Wire(CODES[name], _OPS[op])
