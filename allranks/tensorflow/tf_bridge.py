"""Calls functions of arrays with tensors, eagerly or in a graph. Runs in every rank.

A collective reduces a tensor in host memory or on its GPU. The arguments ``device_dense`` and
``device_sparse`` of a collective choose, in the notation of ``tf.device``.

A graph of TensorFlow 1 runs its operations in any order, in as many threads as there are cores, and
each rank uses another order. A collective that waits for other ranks must not occupy one of these
threads, and all ranks must run the collectives in the same order (`call_in_order`).

**Threads.** TensorFlow computes the elements of datasets in separate threads, and adds one for each
thread that waits. So the function becomes a dataset of one element.

**Order.** The ranks match collectives by name. When the agreed order is used up, the first rank
broadcasts the names of its ready collectives. Every rank runs these next, each as soon as it is
ready there. One of the waiting threads runs all of them, to avoid a thread switch for each.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from allranks import collectives
from allranks.collectives import ProcessSet
from allranks.collectives.calls.rank_state import interrupt_pipe
from allranks.collectives.gpu import cupy_api, dlpack
from allranks.collectives.world.world import World, current
from allranks.errors import CollectiveMismatch, MissingDependency, UsageError
from allranks.tensorflow import graph_errors

Array = NDArray[Any]
Function = Callable[..., Sequence[Any]]
HOST = "/cpu:0"
# The tensor's own device.
ANYWHERE = ""
# TensorFlow ends the process if memory that it takes over is not aligned to this.
_ALIGNED_NBYTES = 64
# Below this size, a copy is faster than DLPack.
_COPIED_NBYTES = 64 << 10
# Python reports Ctrl-C to the main thread only, so a wait in another one looks for it.
_POLL_SECONDS = 0.05
# How long a rank waits for a collective that the first rank has named before it is a mismatch.
_PATIENCE_SECONDS = 60.0


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
    # TensorFlow accepts only these characters in the name of an operation.
    valid = None if name is None else re.sub(r"[^\w.\-/]", "_", name)
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


def to_tensor(value: Any) -> Any:
    """Returns a value as a dense tensor.

    Raises TypeError, which says what to type, if it is none of numbers or bool.
    """
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        if type(value).__name__ == "KerasTensor":
            raise  # Keras says where it can be used
        raise TypeError(f"a collective needs a dense tensor, {_instead(value)}") from error
    if tensor.dtype == tf.string:
        raise TypeError(f"a collective needs numbers or bool, found strings. {_OTHERS}")
    return tensor


_OTHERS = "Send other things with broadcast_object or allgather_object."


def _instead(value: Any) -> str:
    """Returns what was found in place of a dense tensor, and what to type."""
    if isinstance(value, tf.RaggedTensor):
        return (
            f"found a RaggedTensor of shape {value.shape}, whose rows differ in length. Pass "
            "x.to_tensor(), which fills them up with zeros to equal shapes, or gather the rows of "
            "all ranks: allgather_object(x.to_list())."
        )
    if isinstance(value, tf.SparseTensor):
        return f"found a SparseTensor of shape {value.shape}. Pass tf.sparse.to_dense(x)."
    if isinstance(value, list | tuple):
        return f"found a list whose parts differ in shape, or are no numbers. {_OTHERS}"
    return f"found {type(value).__name__}. {_OTHERS}"


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
            f"expected a device such as '/cpu:0' or '/gpu:0', found {device!r}. "
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


def call_in_order(
    function: Callable[..., Sequence[Any]],
    tensors: Sequence[Any],
    specs: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    """Like ``tf.numpy_function`` in a graph of TensorFlow 1, for a function with a collective.

    ``specs`` has a ``tf.TensorSpec`` for each result. The outputs have the name ``name``.
    """
    # Filled below: the name is known only after the operation has been created.
    names: list[str] = []

    def call(*arrays: Any) -> Sequence[Any]:
        made: Sequence[Any] = order_of(process_set).run(names[0], lambda: function(*arrays))
        return made

    results = _in_dataset(graph_errors.carried(call), tensors, specs, name)
    names += [_name_on_every_rank(result) for result in results[:1]]
    return results


def _in_dataset(
    function: Callable[..., Any], inputs: Sequence[Any], specs: Sequence[Any], name: str | None
) -> list[Any]:
    dtypes, shapes = [spec.dtype for spec in specs], [spec.shape for spec in specs]
    tensors = list(inputs) or [tf.constant(0)]  # a dataset needs an input

    def element(*parts: Any) -> list[Any]:
        results = tf.numpy_function(function, list(parts[: len(inputs)]), dtypes)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return list(results)

    signature = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    function_of_graph = tf.function(element, input_signature=signature, autograph=False)
    traced = function_of_graph.get_concrete_function()
    # Datasets need host memory.
    with tf.device("/cpu:0"):
        source = tf.raw_ops.TensorDataset(
            components=tensors, output_shapes=[tensor.shape for tensor in tensors]
        )
        dataset = tf.raw_ops.MapDataset(
            input_dataset=source,
            other_arguments=[],
            f=traced,
            output_types=dtypes,
            output_shapes=shapes,
            use_inter_op_parallelism=False,  # otherwise a thread of the graph runs the function
        )
        return list(
            tf.raw_ops.DatasetToSingleElement(
                dataset=dataset, output_types=dtypes, output_shapes=shapes, name=name
            )
        )


def _name_on_every_rank(tensor: Any) -> str:
    """Returns a name for an operation that is the same on every rank.

    Inside a graph each function is a scope of names, and the function's name depends on everything
    that the process has traced before. So operations of the same name are counted instead.
    """
    graph, name = tensor.graph, str(tensor.op.name)
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    if graph is tensor.graph:
        return name
    counts = _names_in_functions.setdefault(graph, Counter())
    counts[name] += 1
    return f"{name} ({counts[name]})"


_names_in_functions: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


class _Pending:
    """A collective that is ready on this rank, and its result."""

    def __init__(self, function: Callable[[], Any], lock: threading.Lock) -> None:
        self.function = function
        self.changed = threading.Condition(lock)
        self.over = False
        self.result: Any = None
        self.error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        self.over, self.error = True, error
        self.changed.notify()


class CallOrder:
    """The order of one process set's collectives, and those that are ready on this rank."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._ready: dict[str, deque[_Pending]] = {}
        self._agreed: deque[str] = deque()
        self._has_runner = False

    def is_of_removed(self, successor: ProcessSet) -> bool:
        """Returns whether the process set was removed, and ``successor`` has its number."""
        own = self._process_set
        if own.process_set_id == 0:
            return False
        return own.process_set_id is None or own.ranks != successor.ranks

    def run(self, name: str, function: Callable[[], Any]) -> Any:
        """Calls a function when it is the next one on every rank, and returns its result."""
        with self._lock:
            own = _Pending(function, self._lock)
            self._ready.setdefault(name, deque()).append(own)
            self._arrived.notify()
            while not own.over:
                if self._has_runner:
                    own.changed.wait()
                else:
                    self._run_until(own)
        if own.error is not None:
            raise own.error
        return own.result

    def _run_until(self, own: _Pending) -> None:
        """Runs collectives in order until this one has ended, and the ready ones after it."""
        self._has_runner = True
        try:
            while not own.over or (self._agreed and self._agreed[0] in self._ready):
                if not self._agreed:
                    self._agreed.extend(self._agree())
                self._execute(self._next())
        except BaseException as error:
            # Otherwise the other threads wait for collectives that the other ranks have left.
            self._agreed.clear()
            for pending in [one for same in self._ready.values() for one in same]:
                pending.end(error)
            self._ready.clear()
        finally:
            self._has_runner = False
            # Another waiting thread runs the collectives from here on.
            if self._ready:
                next(iter(self._ready.values()))[0].changed.notify()

    def _next(self) -> _Pending:
        name, began, noticed = self._agreed[0], time.monotonic(), False
        while name not in self._ready:
            if self._arrived.wait(_POLL_SECONDS):
                continue
            if interrupt_pipe.received():
                raise KeyboardInterrupt
            waited = time.monotonic() - began
            if waited > _PATIENCE_SECONDS:
                raise CollectiveMismatch(
                    f"{name} needs every rank to run it: {self._found(waited)}. "
                    "Fetch the same operations on every rank."
                )
            if waited > current().late_seconds and not noticed:
                noticed = True
                current().notice(f"{name} is next on all ranks: {self._found(waited)}")
        same = self._ready[name]
        pending = same.popleft()
        if not same:
            del self._ready[name]
        self._agreed.popleft()
        return pending

    def _found(self, waited: float) -> str:
        return (
            f"rank {current().rank} has not reached it for {waited:.0f} s, "
            f"and waits in {', '.join(self._ready)}"
        )

    def _execute(self, pending: _Pending) -> None:
        # Released, so that other collectives can become ready while this one waits.
        error: BaseException | None = None
        try:
            self._lock.release()  # in ``try``: an interrupt may come right after it
            pending.result = pending.function()
        except BaseException as raised:
            error = raised
        finally:
            self._lock.acquire()
        pending.end(error)
        # An interrupt ends the other waits too; an exception belongs to this collective alone.
        if error is not None and not isinstance(error, Exception):
            raise error

    def _agree(self) -> list[str]:
        """Returns the first rank's ready collectives. Collective over the process set."""
        mine = [name for name, same in self._ready.items() for _ in same]
        try:
            self._lock.release()
            agreed: list[str] = collectives.broadcast_object(
                mine, self._process_set.ranks[0], process_set=self._process_set
            )
        finally:
            self._lock.acquire()
        return agreed


_Key = tuple[int | None, int, int]
# By world, because each member of an ensemble has a world; by process set; and by epoch and cell,
# because the order of an interrupted cell is not valid in the next one.
_orders: WeakKeyDictionary[World, dict[_Key, CallOrder]] = WeakKeyDictionary()
_choosing = threading.Lock()


def order_of(process_set: ProcessSet) -> CallOrder:
    world = current()
    here = _orders.setdefault(world, {})
    key = process_set.process_set_id, world.epoch, world.scope.number
    with _choosing:
        if key not in here or here[key].is_of_removed(process_set):
            for other in [other for other in here if other[0] == key[0]]:
                del here[other]
            here[key] = CallOrder(process_set)
        return here[key]


def forget_orders() -> None:
    # Called by shutdown(), which ends all collectives.
    _orders.clear()
