"""Collectives on numbers, lists and arrays, and `load_model`. Runs in every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from allranks.collectives import Average, ReduceOp
from allranks.errors import UsageError
from allranks.tensorflow import ops
from allranks.tensorflow.compression import Compression
from allranks.tensorflow.keras_optimizer import DistributedOptimizer
from allranks.tensorflow.keras_version import LEGACY, keras


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Returns the reduction of a value over all ranks, as a tensor.

    Args:
        value: a number, a list or an array of the same shape and dtype on every rank.
        average: the deprecated form of ``op=Average`` or ``op=Sum``.
        op: Average by default.

    Collective over all ranks.
    """
    return ops.allreduce(
        tf.constant(value),
        average=average,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Returns all ranks' values, concatenated in a tensor. Collective over all ranks.

    Args:
        value: a list or an array; the first dimension may differ between ranks.
    """
    return ops.allgather(tf.constant(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the root's value on every rank, as a tensor. Collective over all ranks."""
    return ops.broadcast(tf.constant(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """Returns this rank's part of the reduction over all ranks. Collective over all ranks."""
    return ops.reducescatter(tf.constant(value), op=op, name=name)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Returns a saved model with a distributed optimizer, which has the saved state.

    Args:
        filepath: as for ``keras.models.load_model``; every rank reads it.
        custom_optimizers: optimizer classes that Keras does not have.
        custom_objects: as for ``keras.models.load_model``.
        compression: as in `allreduce`.
        legacy_opts: whether to use the legacy optimizers; True only with Keras 2.

    Raises:
        UsageError: ``legacy_opts=True`` with Keras 3.
    """
    if legacy_opts and not LEGACY:
        raise UsageError(
            "Keras 3 has no legacy optimizers, found legacy_opts=True. Leave it out; a model that "
            "was saved with one loads with TF_USE_LEGACY_KERAS=1 and: "
            "pip install 'allranks[legacy-keras]'"
        )
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
