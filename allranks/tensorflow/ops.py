"""Collectives on tensors, by Horovod's names, with Horovod's gradients. Runs in every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.tensorflow.crossing import cross
from allranks.tensorflow.gathers import allgather, alltoall, broadcast, grouped_allgather
from allranks.tensorflow.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]


def join() -> Any:
    """This rank has no more data: until all ranks have joined, it brings zeros to allreduces.

    Returns:
        The rank that joined last, an int32 tensor.

    Collective over all ranks.
    """
    outputs = [tf.TensorSpec([], tf.int32)]
    return cross(lambda: [np.int32(collectives.join())], [], outputs, "join")[0]
