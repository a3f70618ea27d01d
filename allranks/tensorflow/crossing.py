"""From tensors to arrays and back, now or when the graph runs. Runs in every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from allranks.collectives import ProcessSet
from allranks.tensorflow import aside, failures, places, turns

Array = NDArray[Any]
_ALIGNED = 64
"""TensorFlow takes over memory on such a boundary only, and ends the process at any other."""
_WORTH = 64 << 10
"""Bytes from which taking memory over is cheaper than copying it."""


def cross(
    function: Callable[..., Sequence[Any]],
    tensors: Sequence[Any],
    outputs: Sequence[Any],
    name: str | None = None,
    among: ProcessSet | None = None,
    devices: Sequence[str] = (),
) -> list[Any]:
    """Calls a function of arrays with tensors.

    Inside ``tf.function`` the calls of one trace run in the order in which they were traced.

    Args:
        function: takes as many arrays as there are tensors, which it must not write to, and
            returns as many as there are outputs. Where ``devices`` let a tensor stay on its GPU
            it takes that tensor, and may return one.
        tensors: of any shape and dtype.
        outputs: a ``tf.TensorSpec`` each.
        name: the name of the operation in a graph.
        among: whose ranks the function talks to: in a graph of TensorFlow 1, which orders
            nothing, they take turns.
        devices: one a tensor, as ``tf.device`` has it, "" for where it is; without any of them
            all tensors become arrays in host memory, as they do in a graph of TensorFlow 1.

    Returns:
        A tensor for each output; an eager one lives on the device of the first tensor.
    """
    where = devices or [places.HOST] * len(tensors)

    def call(*eager: Any) -> list[Any]:
        made = function(*map(_bring, eager, where))
        device = eager[0].device if eager else ""
        return [to_tensor(each, device) for each in made]

    if tf.executing_eagerly():
        with failures.published():
            return call(*tensors)
    called = None if name is None else _in_graph(name)
    version_1 = not tf.compat.v1.executing_eagerly_outside_functions()
    if among is not None and version_1:
        return _in_turn(function, tensors, outputs, called, among)
    # What is a numpy function in a graph has its tensors brought to host memory by TensorFlow.
    stays = not version_1 and any(map(places.may_stay, where))
    in_graph, does = (tf.py_function, call) if stays else (tf.numpy_function, function)
    results = in_graph(
        failures.carried(does), list(tensors), [spec.dtype for spec in outputs], name=called
    )
    for result, spec in zip(results, outputs, strict=True):
        result.set_shape(spec.shape)
    return list(results)


def like(tensor: Any, *, open_rows: bool = False) -> Any:
    """The shape and dtype of a tensor; ``open_rows`` leaves its first dimension open."""
    shape = tensor.shape
    if open_rows and shape.rank:
        shape = tf.TensorShape([None]).concatenate(shape[1:])
    return tf.TensorSpec(shape, tensor.dtype)


def _in_turn(
    function: Callable[..., Sequence[Any]],
    tensors: Sequence[Any],
    outputs: Sequence[Any],
    name: str | None,
    among: ProcessSet,
) -> list[Any]:
    """What the function returns; it is called when it is its turn on every rank."""
    names: list[str] = []

    def call(*arrays: Array) -> Sequence[Any]:
        made: Sequence[Any] = turns.of(among).take(names[0], lambda: function(*arrays))
        return made

    results = aside.numpy_function(failures.carried(call), tensors, outputs, name)
    names += [_numbered(result) for result in results[:1]]
    return results


def _bring(tensor: Any, device: str) -> Any:
    there = places.brought(tensor, device)
    return to_array(tensor) if there is None else there


def to_array(tensor: Any) -> Array:
    """An eager tensor's own memory, not to be written to."""
    if tensor.dtype == tf.bfloat16 and tensor.shape.rank == 0:
        # To numpy a bfloat16 without dimensions is a number and no array.
        return np.asarray(tensor.numpy())
    return np.asarray(tensor)


def to_tensor(array: Any, device: str = "") -> Any:
    """A tensor of an array, whose memory it takes over where it can."""
    if tf.is_tensor(array):
        return array
    array = np.asarray(array)
    if "GPU" not in device and array.nbytes >= _WORTH and array.flags.c_contiguous:
        aligned = array.__array_interface__["data"][0] % _ALIGNED == 0
        if aligned and array.flags.writeable and array.dtype.kind in "fiu":
            return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    with tf.device(device or None):
        return tf.convert_to_tensor(array)


def _numbered(tensor: Any) -> str:
    """An operation's name in the graph that is run: the same on every rank.

    The functions inside a graph each have names of their own, and their own name depends on all
    that the process has traced before: those of a name are counted.
    """
    graph, name = tensor.graph, str(tensor.op.name)
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    if graph is tensor.graph:
        return name
    counts = _in_functions.setdefault(graph, Counter())
    counts[name] += 1
    return f"{name} ({counts[name]})"


_in_functions: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def _in_graph(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_.-/" else "_" for c in name)
