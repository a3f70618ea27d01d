"""Batch normalization with the statistics of all ranks' batches. Runs in every rank.

A separate file because it imports Keras, which scripts of TensorFlow 1 do not need.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from allranks.collectives import Sum
from allranks.errors import UsageError
from allranks.tensorflow.keras_version import LEGACY, keras
from allranks.tensorflow.ops import allreduce
from allranks.tensorflow.patches import require


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
            allreduce(tf.stack(own), op=Sum, name=f"{self.name}/moments")
        )
        mean = total / tf.maximum(count, 1.0)
        variance = tf.maximum(squares / tf.maximum(count, 1.0) - tf.square(mean), 0.0)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


# Keras writes these names into a saved model, and finds the class by them.
SyncBatchNormalization.__module__ = "keras.layers"
SyncBatchNormalization.__name__ = "BatchNormalization"
