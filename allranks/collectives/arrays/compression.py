"""Fewer bytes on the way."""

from __future__ import annotations

from typing import Any

import numpy as np

from allranks.collectives.arrays.reductions import Array


class NoneCompressor:
    """Sends what it is given."""

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
    """The compressions that allreduce and reducescatter take, by Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
