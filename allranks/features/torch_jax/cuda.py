"""Tensors on this rank's GPU: their memory as arrays of cupy, and torch's streams beside ours. This
module imports torch.

A call begins behind the work that torch's current stream holds when the call is made. Its own work
is on a stream of allranks: what is copied before and after the move, and the streams of the
transport, wait for each other there. `wait` makes torch's current stream wait for the call's last
event, and not the host. All memory is torch's, except that of a transport. A call keeps its tensors
until the GPU has ended it, so a stream may use results as torch's own: after `record_stream`.

Source: CUDA stream protocol of cuda-python; torch.cuda.ExternalStream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from allranks.collectives import world as worlds
from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls.call import Call, Steps
from allranks.collectives.gpu import cupy_api
from allranks.collectives.gpu.cupy_api import Stream
from allranks.collectives.gpu.device import Device
from allranks.collectives.ops.inputs import read_inputs
from allranks.errors import MissingDependency

_streams: dict[int, tuple[Device, Stream]] = {}
"""The stream of the calls on each GPU object; a rank has one."""


def is_on_gpu(tensor: Any) -> bool:
    return bool(tensor.is_cuda)


def number_of(tensor: Any) -> int:
    return int(tensor.device.index or 0)


class _TorchStream:
    """A stream of torch, for cupy: not every torch has the protocol."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def current_pointer(number: int) -> int:
    """torch's current stream on a GPU."""
    return int(torch.cuda.current_stream(number).cuda_stream)


@contextmanager
def on_stream(pointer: int, number: int) -> Iterator[Any]:
    """Within, torch's current stream is another one."""
    with torch.cuda.stream(torch.cuda.ExternalStream(pointer, number)) as stream:
        yield stream


def copy(to: Any, source: Any) -> None:
    """Queues a copy on cupy's current stream."""
    stream = cupy_api.installed().cuda.get_current_stream()
    with on_stream(stream.ptr, number_of(to)):
        to.copy_(source)
        # torch has allocated it on another stream, and reuses its memory there.
        source.record_stream(torch.cuda.current_stream(number_of(to)))


def to_host(tensor: Any) -> Any:
    """A copy in host memory, once torch's current stream has produced the tensor."""
    found = tensor.detach().cpu()
    return found.contiguous() if found.layout == torch.strided else found


def from_host(tensor: Any, source: Any) -> None:
    """Copies to a tensor on torch's current stream."""
    with torch.no_grad():  # a detached sparse tensor would keep its elements
        tensor.copy_(source)


def end_of_copy(tensor: Any) -> Any:
    """An event behind what torch's current stream holds."""
    return torch.cuda.current_stream(number_of(tensor)).record_event()


def future_devices(outputs: list[Any]) -> list[Any]:
    """The GPUs that a future with these results has to know."""
    return [torch.device("cuda", number_of(outputs[0]))] if outputs else []


def _cupy() -> Any:
    try:
        return cupy_api.load()
    except MissingDependency as error:
        raise MissingDependency(
            f"{error}\nFor torch's own NCCL instead: %distributed start --torch nccl"
        ) from error


def array_of(tensor: Any, dtype: Any) -> Array:
    """The memory of a contiguous tensor, as an array of cupy that keeps the tensor."""
    cupy, number = _cupy(), number_of(tensor)
    if not tensor.numel():
        with cupy.cuda.Device(number):
            found: Array = cupy.empty(tuple(tensor.shape), dtype)
    else:
        at = tensor.data_ptr()
        memory = cupy.cuda.UnownedMemory(at, tensor.nbytes, tensor, number)
        found = cupy.ndarray(tuple(tensor.shape), dtype, cupy.cuda.MemoryPointer(memory, 0))
    device = worlds.current().gpu
    if device is None or device.number != number:
        read_inputs("torch.distributed", [found], None, "/gpu:0")  # makes it, or refuses this GPU
    return found


def _torchs_stream(number: int) -> Any:
    """torch's current stream, as one of cupy."""
    return _cupy().cuda.Stream.from_external(_TorchStream(current_pointer(number)))


@contextmanager
def behind_torch(number: int) -> Iterator[None]:
    """Within, the work of cupy goes to torch's current stream."""
    with _cupy().cuda.Device(number), _torchs_stream(number):
        yield


def stream_of_calls(device: Device) -> Stream:
    known = _streams.get(device.number)
    if known is None or known[0] is not device:
        with device.cupy.cuda.Device(device.number):
            known = _streams[device.number] = device, device.new_stream()
    return known[1]


def begin(call: Call, device: Device, outputs: Any) -> None:
    """Lets a call begin behind torch's current stream, and end on the GPU alone; within
    `behind_torch`.
    """
    call.queued, call.held = [], list(outputs)
    device.marked(call)
    call.steps = _on_own_stream(call, call.steps, device)


def _on_own_stream(call: Call, steps: Steps[Any], device: Device) -> Steps[Any]:
    """A call's steps, whose work goes to the stream of the calls, and an event behind them."""
    stream = stream_of_calls(device)
    with device.on(stream):
        stream.wait_event(call.ready)
    while True:
        # No step may yield within: the current stream is that of the whole thread.
        with device.on(stream):
            try:
                awaited = next(steps)
            except StopIteration as end:
                done = device.event(stream, timed=True)
                device.queue(call, done, done, done)
                return end.value
        yield awaited


def let_torch_wait(call: Call, device: Device) -> None:
    """Makes torch's current stream wait for the end of a call, whose steps have ended."""
    if call.queued:
        with device.cupy.cuda.Device(device.number):
            _torchs_stream(device.number).wait_event(call.queued[-1][2])


def settle(device: Device) -> None:
    """Returns once the GPU has done what torch's current stream holds; an interrupt ends it."""
    with behind_torch(device.number):
        device.settle()
