"""Calls functions of arrays with tensors, eagerly or in a graph. Runs in every rank.

A collective reduces a tensor in host memory or on its GPU. The arguments ``device_dense`` and
``device_sparse`` of a collective choose, in the notation of ``tf.device``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from allranks.collectives import ProcessSet
from allranks.collectives.gpu import cupy_api, dlpack
from allranks.errors import MissingDependency, UsageError
from allranks.tensorflow import graph_errors
from allranks.tensorflow.graph_function import call_in_order

Array = NDArray[Any]
Function = Callable[..., Sequence[Any]]
HOST = "/cpu:0"
# The tensor's own device.
ANYWHERE = ""
# TensorFlow ends the process if memory that it takes over is not aligned to this.
_ALIGNED_NBYTES = 64
# Below this size, a copy is faster than DLPack.
_COPIED_NBYTES = 64 << 10


def call_on_arrays(
    function: Function,
    tensors: Sequence[Any],
    outputs: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet | None = None,
    devices: Sequence[str] = (),
) -> list[Any]:
    """Calls a function of arrays with tensors; returns a tensor for each ``tf.TensorSpec``.

    Inside ``tf.function`` the calls of one trace run in the order in which they were traced. In a
    graph of TensorFlow 1, which has no order, all ranks of ``process_set`` run the functions in the
    same order.

    Args:
        function: gets a read-only array for each tensor, and returns an array for each output. If
            ``devices`` lets a tensor stay on its GPU, the function gets the tensor and may return
            one.
        devices: for each tensor the device where it is reduced, in the notation of
            ``tf.device``; "" is the tensor's own. Without devices, and in a graph of TensorFlow 1,
            all tensors become arrays in host memory.

    An eager result is on the device of the first tensor.
    """
    places = devices or [HOST] * len(tensors)

    def call(*eager: Any) -> list[Any]:
        made = function(*map(_array_or_tensor, eager, places))
        device = eager[0].device if eager else ""
        return [_to_tensor(each, device) for each in made]

    if tf.executing_eagerly():
        # TensorFlow has not replaced the exception here; only its class may have to change.
        with graph_errors.with_tensorflows_errors():
            return call(*tensors)
    valid = None if name is None else _valid_name(name)
    version_1 = not tf.compat.v1.executing_eagerly_outside_functions()
    if process_set is not None and version_1:
        return call_in_order(function, tensors, outputs, valid, process_set)
    # Both kinds of function are stateful, so tf.function keeps the order of their calls. A
    # numpy_function gets copies in host memory. A py_function costs more, but gets the tensors on
    # their devices.
    stays = not version_1 and any(map(_may_stay_on_gpu, places))
    operation, called = (tf.py_function, call) if stays else (tf.numpy_function, function)
    results = operation(
        graph_errors.carried(called), list(tensors), [spec.dtype for spec in outputs], name=valid
    )
    # The result of a Python function has no static shape in a graph.
    for result, spec in zip(results, outputs, strict=True):
        result.set_shape(spec.shape)
    return list(results)


def differentiable(
    function: Function,
    gradient: Callable[..., Any],
    tensors: Sequence[Any],
    outputs: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    device: str = ANYWHERE,
) -> list[Any]:
    """Like `call_on_arrays`; ``gradient`` maps gradients of the outputs to those of the tensors."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*inputs: Any) -> Any:
        devices = [device] * len(inputs)
        return call_on_arrays(function, inputs, outputs, name, process_set, devices), gradient

    return list(run(*tensors))


def spec_of(tensor: Any, *, open_rows: bool = False) -> Any:
    # With open_rows the first dimension is None.
    shape = tensor.shape
    if open_rows and shape.rank:
        shape = tf.TensorShape([None]).concatenate(shape[1:])
    return tf.TensorSpec(shape, tensor.dtype)


def _array_or_tensor(tensor: Any, device: str) -> Any:
    """Returns the tensor if it is reduced on a GPU, else a read-only view of its memory."""
    if _may_stay_on_gpu(device):
        # A tensor in host memory moves to the GPU only if the caller names that GPU.
        if _device_type(device) == "GPU":
            with tf.device(device):
                tensor = tf.identity(tensor)
        if dlpack.is_on_gpu(tensor):
            return tensor
    if tensor.dtype == tf.bfloat16 and tensor.shape.rank == 0:
        # numpy converts a bfloat16 without dimensions to a scalar.
        return np.asarray(tensor.numpy())
    return np.asarray(tensor)


def _to_tensor(array: Any, device: str) -> Any:
    if tf.is_tensor(array):
        return array
    array = np.asarray(array)
    # numpy exports neither read-only memory nor bfloat16 by DLPack.
    if "GPU" not in device and array.nbytes >= _COPIED_NBYTES and array.flags.c_contiguous:
        aligned = array.__array_interface__["data"][0] % _ALIGNED_NBYTES == 0
        if aligned and array.flags.writeable and array.dtype.kind in "fiu":
            return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    with tf.device(device or None):
        return tf.convert_to_tensor(array)


def _may_stay_on_gpu(device: str) -> bool:
    return _device_type(device) != "CPU" and _can_move_on_gpu()


@cache
def _device_type(device: str) -> str:
    try:
        return tf.DeviceSpec.from_string(device).device_type or ""
    except ValueError as error:
        raise UsageError(
            f"expected a device as '/cpu:0' or '/gpu:0', found {device!r}. "
            "Leave it out: tensors are moved from where they are."
        ) from error


@cache
def _can_move_on_gpu() -> bool:
    # Only cupy moves arrays that are in GPU memory.
    if not tf.config.list_physical_devices("GPU"):
        return False
    try:
        cupy_api.installed()
    except MissingDependency:
        return False
    return True


def _valid_name(name: str) -> str:
    # TensorFlow accepts only these characters in the name of an operation.
    return "".join(c if c.isalnum() or c in "_.-/" else "_" for c in name)
