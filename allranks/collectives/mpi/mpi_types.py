"""Our dtypes and reductions as MPI's.

Source: MPI 4.1, section 6.9.2, predefined reduction operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from allranks.collectives.arrays.reductions import Arithmetic, Array, ReduceOp

_OPS = {
    ReduceOp.Average: MPI.SUM,
    ReduceOp.Sum: MPI.SUM,
    ReduceOp.Min: MPI.MIN,
    ReduceOp.Max: MPI.MAX,
    ReduceOp.Product: MPI.PROD,
}
# MPI's own C_BOOL is missing from some reductions; as bytes, "any" is the largest, "all" the least.
_BOOL_OPS = {
    ReduceOp.Sum: MPI.MAX,
    ReduceOp.Max: MPI.MAX,
    ReduceOp.Min: MPI.MIN,
    ReduceOp.Product: MPI.MIN,
}


def prepare(source: Array, out: Array, how: Arithmetic) -> tuple[Array, Array, MPI.Op]:
    """What MPI reads, where it writes, and its operation."""
    ready = how.wide(source) if how.half else how.prescaled(source)
    if ready is out:
        # Not MPI_IN_PLACE: all members have to pass that, and one that has joined does not.
        ready = out.copy()
    if how.dtype.kind == "b":
        return ready.view(np.uint8), out.view(np.uint8), _BOOL_OPS[how.op]
    kind = how.total
    if how.op is ReduceOp.Sum and kind.kind in "iu" and kind.itemsize < 4:
        # Open MPI saturates sums of 8 and 16 bits on some processors. Wider ones wrap when cut.
        kind = np.dtype(np.int32)
    total = out if kind == out.dtype else np.empty(out.shape, kind)
    if _is_ordered(how):
        return _to_order(ready, how.op), total.view(_order_of(total)), _OPS[how.op]
    return ready.astype(kind, copy=False), total, _OPS[how.op]


def finish(total: Array, out: Array, how: Arithmetic) -> None:
    """Writes what MPI has written to ``total`` as the result."""
    if _is_ordered(how):
        total = _from_order(total)
    how.finish(total, out)


def is_foreign(how: Arithmetic) -> bool:
    """Whether MPI's own reduction may lose a NaN: products of complex numbers, long doubles."""
    if how.dtype.kind == "c":
        return how.op is ReduceOp.Product
    long = how.dtype.kind == "f" and how.dtype.itemsize > 8
    return long and how.op in (ReduceOp.Min, ReduceOp.Max)


def _is_ordered(how: Arithmetic) -> bool:
    """Whether MPI is given integers for floats: its Min and Max of floats may lose a NaN."""
    floats = how.half or how.dtype in (np.float32, np.float64)
    return floats and how.op in (ReduceOp.Min, ReduceOp.Max)


def _order_of(values: Array) -> np.dtype[Any]:
    return np.dtype(np.int32 if values.itemsize == 4 else np.int64)


def _to_order(values: Array, op: ReduceOp) -> Array:
    """Integers in the order of floats, with a NaN, as in numpy, beyond all of them."""
    kind = _order_of(values)
    found = _turned(values.view(kind))
    limits = np.iinfo(kind)
    found[np.isnan(values)] = limits.max if op is ReduceOp.Max else limits.min
    return found


def _from_order(found: Array) -> Array:
    """The floats, in the same memory."""
    np.copyto(found, _turned(found))
    return found.view(np.float32 if found.itemsize == 4 else np.float64)


def _turned(bits: Array) -> Array:
    """Negative floats grow the other way than their bits do: turns these. Twice is not at all."""
    limits = np.iinfo(bits.dtype)
    turned: Array = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
    return turned
