"""Batch normalization with the statistics of all ranks' batches. Runs in every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from allranks.collectives import Sum
from allranks.errors import UsageError
from allranks.tensorflow.ops import allreduce
from allranks.tensorflow.which_keras import LEGACY, keras


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras' ``BatchNormalization`` with the mean and variance of all ranks' batches.

    Gradients flow through the other ranks' statistics too, so that training on n ranks is training
    on the joined batch. Batches may be of different lengths. Without ``training`` nothing is sent.

    A saved model names it as Keras' own layer and loads without allranks. To train a loaded model
    further in step, pass ``custom_objects={"BatchNormalization": hvd.SyncBatchNormalization}``.

    Args:
        fused: Horovod's and Keras 2's; only False is taken.
        kwargs: as for ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: ``fused=True``.

    Collective over all ranks where it is called with ``training=True``.
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
        """The mean and variance of each channel over all ranks, in the inputs' dtype."""
        # Sums of squares in float64 lose nothing when the mean is far from zero.
        values = tf.cast(inputs, tf.float64)
        weights = tf.ones_like(values)
        if mask is not None:
            weights *= tf.cast(tf.expand_dims(mask, -1), tf.float64)
        own = [
            tf.reduce_sum(part, axes, keep_dims)
            for part in (weights, values * weights, tf.square(values) * weights)
        ]
        count, total, squares = tf.unstack(
            allreduce(tf.stack(own), op=Sum, name=f"{self.name}/moments")
        )
        mean = total / tf.maximum(count, 1.0)
        variance = tf.maximum(squares / tf.maximum(count, 1.0) - tf.square(mean), 0.0)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


# What Keras writes into a saved model: a name that it finds by itself.
SyncBatchNormalization.__module__ = "keras.layers"
SyncBatchNormalization.__name__ = "BatchNormalization"
