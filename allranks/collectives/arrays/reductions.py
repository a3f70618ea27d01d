"""The reductions and their arithmetic, one definition for every transport."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class ReduceOp(enum.IntEnum):
    """The kinds of reductions, with the numbers of Horovod."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

_UFUNCS: dict[ReduceOp, np.ufunc] = {
    Average: np.add,
    Sum: np.add,
    Min: np.minimum,
    Max: np.maximum,
    Product: np.multiply,
}
_BOOL: dict[ReduceOp, np.ufunc] = {
    Sum: np.logical_or,
    Max: np.logical_or,
    Min: np.logical_and,
    Product: np.logical_and,
}


@cache  # numpy composes the name anew each time, and slowly
def name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name


def is_half(dtype: np.dtype[Any]) -> bool:
    """True for float16 and bfloat16, which are accumulated in float32."""
    return dtype.itemsize == 2 and (dtype.kind == "f" or name_of(dtype) == "bfloat16")


def is_float(dtype: np.dtype[Any]) -> bool:
    """True for real and complex floating point, bfloat16 included."""
    return dtype.kind in "fc" or name_of(dtype) == "bfloat16"


def check(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Raises `TypeError` if a reduction is not defined for a dtype."""
    if dtype.kind == "b" and op in (Average, Adasum):
        raise TypeError(
            f"{op.name} needs numbers, and this array is bool. "
            "Convert it first: allreduce(x.astype('float32'))."
        )
    if dtype.kind == "c" and op in (Min, Max, Adasum):
        raise TypeError(
            f"{op.name} needs an order, and complex numbers have none. "
            "Reduce the real and imaginary parts separately."
        )
    if op is Adasum and not is_float(dtype):
        raise TypeError(f"Adasum needs floating point, and this array is {dtype.name}. Use Sum.")
    # A float of one byte is a float8, too narrow for sums.
    known = dtype.kind in "biuc" or (dtype.kind == "f" and dtype.itemsize > 1)
    if not (known or name_of(dtype) == "bfloat16"):
        found = "text" if dtype.kind in "SU" else f"an array of {dtype.name}"
        raise TypeError(
            f"a collective needs numbers or bool, found {found}. "
            "Send other things with broadcast_object or allgather_object."
        )


_EXTENDED = np.dtype(np.longdouble)
"""Has each integer of 64 bits, where its precision is at least that of x86."""


def accumulator(op: ReduceOp, dtype: np.dtype[Any], device: str = "") -> np.dtype[Any]:
    if is_half(dtype):
        return np.dtype(np.float32)
    if op is Average and dtype.kind in "iu":
        if dtype.itemsize < 8:
            return np.dtype(np.int64)
        if not device and np.finfo(_EXTENDED).nmant >= 63:
            return _EXTENDED  # a sum of such integers may not fit into one of them
    return dtype


class Arithmetic:
    """One allreduce's arithmetic: prescale, combine, postscale.

    An element is combined either by one rank for all or by all in the same order, so that all
    get the same bits. Integers wrap around as numpy's do, but for averages, which are added up in
    64 bits or in long double; factors act on integers in float64, and the result is cut towards
    zero. Half precision is scaled and accumulated in float32. bool: Sum and Max are "any", Product
    and Min are "all".
    """

    def __init__(
        self,
        op: ReduceOp,
        dtype: np.dtype[Any],
        ranks: int,
        prescale: float,
        postscale: float,
        device: str = "",
    ) -> None:
        self.op, self.dtype, self.ranks, self.device = op, dtype, ranks, device
        self.ufunc = _BOOL[op] if dtype.kind == "b" else _UFUNCS[op]
        self.prescale = prescale
        self.divisor = ranks if op is Average else 1
        self.postscale = postscale
        self.half = is_half(dtype)
        self.total = accumulator(op, dtype, device)
        self.wider = self.total != dtype
        self.copies = self.half or prescale == 1.0
        """True if a rank's values are published unchanged."""
        self.plain = not self.half and prescale == 1.0
        """True if the ranks' values can be combined in place."""
        self.bare = not self.wider and self.divisor == 1 and postscale == 1.0
        """True if ``ufunc`` alone reduces two of them."""
        self.scaled = self.divisor != 1 or postscale != 1.0
        divides = self.divisor != 1 and postscale == 1.0 and is_float(dtype) and not self.half
        self.by = np.array(self.divisor, dtype) if divides else None
        """The divisor in the form in which numpy divides fastest, if division is the only last
        step."""

    def unscaled(self) -> Arithmetic:
        return Arithmetic(self.op, self.dtype, self.ranks, 1.0, self.postscale, self.device)

    def staged(self, values: Array, out: Array) -> None:
        """Writes this rank's values for the other ranks: prescaled, except half precision."""
        if self.copies:
            np.copyto(out, values)
        else:
            scale(values, self.prescale, 1, out)

    def prescaled(self, values: Array) -> Array:
        """The values that `staged` writes; the same array if it would only copy them."""
        if self.copies:
            return values
        out = np.empty_like(values)
        scale(values, self.prescale, 1, out)
        return out

    def combine(self, parts: list[Array], out: Array | None = None) -> Array:
        """The reduction of ``parts``, in their order, postscaled; in ``out``, or in a new array."""
        # numpy allocates a result faster than it fills a given one. For arrays without dimensions
        # it would return a number.
        if out is None and (self.wider or len(parts) == 1 or not parts[0].ndim):
            out = np.empty_like(parts[0])
        if self.wider:
            total = self.wide(parts[0])
            for part in parts[1:]:
                self.ufunc(total, self.wide(part), out=total)
        elif out is not None and len(parts) == 1:
            np.copyto(out, parts[0])
            total = out
        else:
            total = self.ufunc(parts[0], parts[1], out=out)
            for part in parts[2:]:
                self.ufunc(total, part, out=total)
        if out is None:
            out = total
        if self.scaled or total is not out:
            self.finish(total, out)
        return out

    def merged(self, parts: list[Array], out: Array | None = None) -> Array:
        """The sum, in `total`, of staged values or of such sums, for a later `finish`."""
        if out is None:
            out = np.empty(parts[0].shape, self.total)
        if parts[0].dtype != self.total:
            np.copyto(out, self.wide(parts[0]))
            for part in parts[1:]:
                self.ufunc(out, self.wide(part), out=out)
            return out
        if len(parts) == 1:
            np.copyto(out, parts[0])
            return out
        self.ufunc(parts[0], parts[1], out=out)
        for part in parts[2:]:
            self.ufunc(out, part, out=out)
        return out

    def merging(self, parts: list[Array], out: Array) -> Callable[[], object]:
        """The function that merges these arrays, for arrays that are used again and again."""
        if len(parts) == 2 and not self.wider:
            return partial(self.ufunc, *parts, out=out)
        return partial(self.merged, parts, out)

    def finish(self, total: Array, out: Array) -> None:
        """Writes accumulated values, postscaled, to ``out``, which may be ``total`` itself. Values
        in another dtype than `total` are cut first.
        """
        if self.by is not None and type(total) is np.ndarray:
            np.divide(total, self.by, out=out)
            return
        if total.dtype not in (self.total, out.dtype):
            np.copyto(out, total, casting="unsafe")
            total = out
        extended = total.dtype == _EXTENDED != self.dtype
        if extended and self.postscale != 1.0:
            total = total.astype(np.float64)  # in which factors act on integers
        if self.scaled:
            scale(total, self.postscale, self.divisor, total)
        if extended:
            # A sum that is rounded up may be beyond the largest integer.
            limits = np.iinfo(self.dtype)
            np.clip(total, limits.min, limits.max, out=total)
        if total is not out:
            np.copyto(out, total, casting="unsafe")

    def wide(self, part: Array) -> Array:
        """Staged values for accumulation: half precision is prescaled here, in float32."""
        wide: Array = part.astype(self.total)
        if self.half and self.prescale != 1.0:
            scale(wide, self.prescale, 1, wide)
        return wide


class ExactArithmetic(Arithmetic):
    """The arithmetic of one integer of Python on each rank, whose sums and products have any size.

    A result that does not fit into 64 bits is an array of an object. Ranks that bring an integer of
    numpy to the same call get what fits.
    """

    def combine(self, parts: list[Array], out: Array | None = None) -> Array:
        found = super().combine(parts, out)
        if out is None:
            exact = (sum if self.op is Sum else math.prod)(map(int, parts))
            if exact != int(found):
                return np.array(exact, object)
        return found


def scale(values: Array, factor: float, divisor: int, out: Array) -> None:
    """Writes values × factor / divisor; integers are truncated towards zero."""
    if is_float(values.dtype) and not is_half(values.dtype):
        if divisor != 1:
            np.divide(values, divisor, out=out)
            values = out
        if factor != 1.0:
            np.multiply(values, factor, out=out)
        elif values is not out:
            np.copyto(out, values)
        return
    wide: Array = values.astype(np.float32 if is_float(values.dtype) else np.float64)
    np.copyto(out, wide / divisor * factor, casting="unsafe")


def adasum(
    parts: list[NDArray[Any]], prescale: float = 1.0, postscale: float = 1.0
) -> NDArray[Any]:
    """The combination of all parts, a power of two of shape (n,), pairwise in a tree, in float64.

    Every rank holds all parts, so this takes as many times an array's memory as there are ranks.
    """
    level = [part.astype(np.float64) * prescale for part in parts]
    while len(level) > 1:
        level = [_pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return (level[0] * postscale).astype(parts[0].dtype)


def _pair(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    dot, squared_a, squared_b = np.dot(a, b), np.dot(a, a), np.dot(b, b)
    keep_a = 1.0 - dot / (2.0 * squared_a) if squared_a else 1.0
    keep_b = 1.0 - dot / (2.0 * squared_b) if squared_b else 1.0
    result: NDArray[Any] = keep_a * a + keep_b * b
    return result


class NoneCompressor:
    """Sends arrays unchanged."""

    name = ""

    @staticmethod
    def compress(array: Array) -> tuple[Array, Any]:
        """The array, and nothing to remember."""
        return array, None

    @staticmethod
    def decompress(array: Array, context: Any) -> Array:
        """The array."""
        return array


class FP16Compressor:
    """Sends floating point as float16, and gives back the dtype it was; integers stay as they are.

    Values beyond 65,504 become infinite.
    """

    name = "fp16"

    @staticmethod
    def compress(array: Array) -> tuple[Array, Any]:
        """The array as float16, and its dtype."""
        if array.dtype.kind == "f" and array.dtype.itemsize > 2:
            return array.astype(np.float16), array.dtype
        return array, None

    @staticmethod
    def decompress(array: Array, context: Any) -> Array:
        """The array in the dtype that it had."""
        return array if context is None else array.astype(context)


class Compression:
    """The values of the argument ``compression``, with the names of Horovod."""

    none = NoneCompressor
    fp16 = FP16Compressor
