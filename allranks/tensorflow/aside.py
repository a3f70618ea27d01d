"""A Python function in a graph, whose waiting keeps no thread of the graph's. Runs in every rank.

TensorFlow runs a graph in as many threads as there are cores, and a Python function in it keeps one
for as long as it waits for other ranks. What makes a dataset's elements runs elsewhere, in threads
of which TensorFlow makes as many as wait. So the function becomes a dataset of one element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def numpy_function(
    function: Callable[..., Any], inputs: Sequence[Any], specs: Sequence[Any], name: str | None
) -> list[Any]:
    """As ``tf.numpy_function``, in a graph of TensorFlow 1.

    Args:
        function: takes and returns arrays.
        inputs: tensors.
        specs: a ``tf.TensorSpec`` of each output.
        name: of the operation whose outputs are returned.
    """
    dtypes, shapes = [spec.dtype for spec in specs], [spec.shape for spec in specs]
    tensors = list(inputs) or [tf.constant(0)]  # no dataset is of nothing

    def made(*elements: Any) -> list[Any]:
        results = tf.numpy_function(function, list(elements[: len(inputs)]), dtypes)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return list(results)

    takes = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    traced = tf.function(made, input_signature=takes, autograph=False).get_concrete_function()
    # Datasets live in host memory.
    with tf.device("/cpu:0"):
        element = tf.raw_ops.TensorDataset(
            components=tensors, output_shapes=[tensor.shape for tensor in tensors]
        )
        dataset = tf.raw_ops.MapDataset(
            input_dataset=element,
            other_arguments=[],
            f=traced,
            output_types=dtypes,
            output_shapes=shapes,
            use_inter_op_parallelism=False,  # what runs the graph would run the function else
        )
        return list(
            tf.raw_ops.DatasetToSingleElement(
                dataset=dataset, output_types=dtypes, output_shapes=shapes, name=name
            )
        )
