"""Collectives on numbers, lists and arrays, `load_model`, and a layer. Runs in every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from allranks.collectives import Average, ReduceOp, Sum
from allranks.errors import UsageError
from allranks.keras.private_names import require
from allranks.keras.versions import LEGACY, keras
from allranks.tensorflow import ops
from allranks.tensorflow.compression import TensorCompression
from allranks.tensorflow.keras_optimizer import DistributedOptimizer


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = TensorCompression.none,
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
    compression: Any = TensorCompression.none,
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


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras' ``BatchNormalization`` with the mean and variance of all ranks' batches.

    Gradients include the other ranks' statistics, so training on n ranks equals training on the
    joined batch. Batches may have different lengths. Without ``training`` nothing is sent.

    A saved model contains the layer under the name of Keras' own layer, and loads without allranks.
    To train a loaded model on all ranks, load it with
    ``custom_objects={"BatchNormalization": hvd.SyncBatchNormalization}``.

    Args:
        fused: only False is accepted.
        kwargs: as in ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: ``fused=True``.
        MissingDependency: this Keras computes the moments by another method.

    A call with ``training=True`` is collective over all ranks.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError(
                f"SyncBatchNormalization needs fused=False, found fused={fused}: the moments of "
                "all ranks are needed before the rest. Leave out fused=."
            )
        if kwargs.get("synchronized"):
            raise UsageError(
                "SyncBatchNormalization is synchronized by itself, found synchronized=True, which "
                "is for tf.distribute. Leave it out."
            )
        own = "_calculate_mean_and_var" if LEGACY else "_moments"
        require(keras.layers.BatchNormalization, own)
        super().__init__(**({"fused": False} if LEGACY else {}), **kwargs)

    if LEGACY:

        def _calculate_mean_and_var(
            self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None
        ) -> tuple[Any, Any]:
            return self._of_all(inputs, reduction_axes, keep_dims, mask)

    else:

        def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
            return self._of_all(inputs, self._reduction_axes, False, mask)

    def _of_all(self, inputs: Any, axes: Any, keep_dims: bool, mask: Any) -> tuple[Any, Any]:
        """Returns each channel's mean and variance over all ranks, in the inputs' dtype."""
        # In float64, because a sum of squares in float32 loses digits if the mean is large.
        values = tf.cast(inputs, tf.float64)
        weights = tf.ones_like(values)
        if mask is not None:
            weights *= tf.cast(tf.expand_dims(mask, -1), tf.float64)
        own = [
            tf.reduce_sum(part, axes, keep_dims)
            for part in (weights, values * weights, tf.square(values) * weights)
        ]
        # One call for all three, because each call waits for all ranks.
        count, total, squares = tf.unstack(
            ops.allreduce(tf.stack(own), op=Sum, name=f"{self.name}/moments")
        )
        mean = total / tf.maximum(count, 1.0)
        variance = tf.maximum(squares / tf.maximum(count, 1.0) - tf.square(mean), 0.0)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


# Keras writes these names into a saved model, and finds the class by them.
SyncBatchNormalization.__module__ = "keras.layers"
SyncBatchNormalization.__name__ = "BatchNormalization"
