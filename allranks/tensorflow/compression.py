"""Compression of tensors for a reduction. Runs in every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from allranks.tensorflow.graph_errors import UsageError
from allranks.tensorflow.tf_bridge import to_tensor


class TensorCompressor:
    """Packs tensors before a reduction and unpacks them after it."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor to send, and the context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns a received tensor as it was before `compress`."""
        raise NotImplementedError


class NoneTensorCompressor(TensorCompressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP16TensorCompressor(TensorCompressor):
    """Sends floating-point tensors as float16; values beyond 65,504 become infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor as float16, and its dtype; integers and bfloat16 are unchanged."""
        if tensor.dtype.is_floating and tensor.dtype.size > 2:
            return tf.cast(tensor, tf.float16), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor in its former dtype."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class TensorCompression:
    """The compressions, by Horovod's names; the public name is `Compression`."""

    none = NoneTensorCompressor
    fp16 = FP16TensorCompressor


#: The names that `horovod.tensorflow.compression` has.
Compressor = TensorCompressor
NoneCompressor = NoneTensorCompressor
FP16Compressor = FP16TensorCompressor
Compression = TensorCompression


def check(compression: Any) -> None:
    if not hasattr(compression, "compress"):
        raise UsageError(
            f"expected compression Compression.none or Compression.fp16, found "
            f"{compression!r:.60}. Type: compression=hvd.Compression.fp16"
        )


def compress_all(compression: Any, tensors: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    pairs = [compression.compress(to_tensor(tensor)) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [context for _, context in pairs]


def decompress_all(compression: Any, tensors: Sequence[Any], contexts: Sequence[Any]) -> list[Any]:
    return [compression.decompress(t, c) for t, c in zip(tensors, contexts, strict=True)]
