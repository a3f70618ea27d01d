"""Where a tensor meets those of the other ranks: in host memory, or on its GPU. In every rank.

A call's ``device_dense`` and ``device_sparse`` say it as ``tf.device`` does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import tensorflow as tf

from allranks.collectives.gpu import api, kinds
from allranks.errors import MissingDependency, UsageError

HOST = "/cpu:0"
ANYWHERE = ""
"""Where the tensor is."""


def may_stay(device: str) -> bool:
    """Whether a tensor that is on a GPU is moved from there, and not through host memory.

    Raises:
        UsageError: this names no device.
    """
    return _kind(device) != "CPU" and _sees_gpu()


def brought(tensor: Any, device: str) -> Any:
    """An eager tensor where it is to meet the others: on the GPU, or None for host memory.

    Raises:
        UsageError: this names no device.
    """
    if not may_stay(device):
        return None
    if _kind(device) == "GPU":
        with tf.device(device):
            tensor = tf.identity(tensor)
    return tensor if kinds.is_on_gpu(tensor) else None


@cache
def _kind(device: str) -> str:
    try:
        return tf.DeviceSpec.from_string(device).device_type or ""
    except ValueError as error:
        raise UsageError(
            f"expected a device as '/cpu:0' or '/gpu:0', found {device!r}. "
            "Leave it out: tensors are moved from where they are."
        ) from error


@cache
def _sees_gpu() -> bool:
    """Whether TensorFlow has a GPU, and cupy is there to move what is on it."""
    if not tf.config.list_physical_devices("GPU"):
        return False
    try:
        api.installed()
    except MissingDependency:
        return False
    return True
