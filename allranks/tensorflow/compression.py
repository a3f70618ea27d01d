"""Fewer bytes on the way, on tensors. Runs in every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from allranks.tensorflow.failures import UsageError


class Compressor:
    """How tensors are packed before a reduction and unpacked after it."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What travels, and what `decompress` must know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """What arrived, as it was before `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends what it is given."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor, and nothing to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating point as float16; values beyond 65,504 become infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor as float16, and its dtype; integers and bfloat16 as they are."""
        if tensor.dtype.is_floating and tensor.dtype.size > 2:
            return tf.cast(tensor, tf.float16), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor in the dtype that it had."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """The compressions by Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor


def check(compression: Any) -> None:
    """Says that something compresses nothing.

    Raises:
        UsageError: it does not.
    """
    if not hasattr(compression, "compress"):
        raise UsageError(
            f"expected compression Compression.none or Compression.fp16, found "
            f"{compression!r:.60}. Type: compression=hvd.Compression.fp16"
        )
