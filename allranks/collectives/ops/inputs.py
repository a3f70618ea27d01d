"""The arguments of a call as arrays in host memory or on this rank's GPU, and handles of posted
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.arrays.libraries import HOST_TYPES, Restore, to_numpy
from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.specs import Spec
from allranks.collectives.gpu import dlpack
from allranks.collectives.gpu.device import Device
from allranks.collectives.gpu.transport import (
    ON_GPU,
    Placement,
    environment_placement,
    is_of_a_gpu,
    read_placement,
)
from allranks.collectives.world import world as worlds
from allranks.errors import StaleHandle, UsageError


@dataclass(slots=True)
class CollectiveInputs:
    """A call's arrays, and the functions that convert its results to the kinds of the inputs."""

    sources: list[Array] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    """No function at all if the arrays are of cupy, as the results are."""
    device: str = ""
    """"gpu" or ""; part of the comparison between ranks."""
    transport: str = ""
    gpu: Device | None = None
    """This rank's GPU, if the arrays are on it."""
    at_once: bool = False
    """Whether a result must be complete before it is converted."""

    def spec(self, op: str, dtype: str, shape: tuple[object, ...], root: int = -1) -> Spec:
        return Spec(op, "", dtype, shape, root, transport=self.transport, device=self.device)

    def copying(self, call: Call) -> AbstractContextManager[None]:
        """The context for copies before the move; on a GPU after the caller's work on them."""
        return nullcontext() if self.gpu is None else self.gpu.copying(call)

    def marked(self, call: Call) -> Call:
        """The call itself; on a GPU it begins after the caller's work on the inputs."""
        return call if self.gpu is None else self.gpu.marked(call)

    def restored(self, outs: list[Array]) -> list[Any]:
        """The results, each as the kind of its input."""
        if not self.restores:
            return outs
        if self.at_once and self.gpu is not None:
            # One wait for all results.
            outs = [dlpack.aligned(out) for out in outs]
            self.gpu.settle()
        return [restore(out) for restore, out in zip(self.restores, outs, strict=True)]

    def restored_alone(self, out: Array) -> Any:
        if self.at_once or not self.restores:
            return self.restored([out])[0]
        return self.restores[0](out)


def listed(kind: str, values: Any) -> Sequence[Any]:
    """The arrays of a call, which an iterator has only once."""
    if isinstance(values, list | tuple):
        return values
    try:
        items = None if isinstance(values, dict) else iter(values)
    except TypeError:
        items = None
    if items is not None:
        return list(items)
    raise UsageError(
        f"{kind} expected a list of arrays, the same on every rank, found "
        f"{type(values).__name__}. Type: {kind}([x, y])"
    )


def read_inputs(
    kind: str, values: Sequence[Any], transport: str | None, device: str, *, host: bool = False
) -> CollectiveInputs:
    """The arrays of a call, in the memory from which they move: with ``host`` in host memory."""
    gpu = worlds.process.gpu if worlds.process is not None else None
    on_it = gpu is not None and not (host or device) and len(values) and gpu.has(*values)
    if on_it and is_of_a_gpu(transport):
        # Arrays of cupy are moved as they are.
        return CollectiveInputs([*values], device="gpu", transport=transport or "", gpu=gpu)
    want = read_placement(kind, transport, device) if transport or device else Placement()
    on_gpu: list[bool] = []
    if want.memory != "cpu":
        on_gpu = [not isinstance(value, HOST_TYPES) and dlpack.is_on_gpu(value) for value in values]
        if want.transport and not want.memory and not all(on_gpu):
            value = values[on_gpu.index(False)]
            raise UsageError(
                f"transport={want.transport!r} moves arrays that are on a GPU: found one in host "
                f"memory ({type(value).__name__}). Pass cupy.asarray(x), or device='/gpu:0'."
            )
        if want == Placement() and any(on_gpu):
            want = environment_placement(kind)
            # Without cupy, other libraries' arrays go through the host.
            if not want.transport and any(map(dlpack.without_cupy, values)):
                want = Placement("cpu")
        if want.memory == "cpu" or not (any(on_gpu) or want.memory == "gpu"):
            on_gpu = []
    if not on_gpu or host:
        return _in_host_memory(values, want if want.memory == "cpu" else Placement())
    return _on_gpu(kind, values, on_gpu, want.transport)


def _in_host_memory(values: Sequence[Any], want: Placement) -> CollectiveInputs:
    inputs = CollectiveInputs(transport=want.transport)
    for value in values:
        source, restore = to_numpy(value)
        inputs.sources.append(source)
        inputs.restores.append(restore)
    return inputs


def _on_gpu(
    kind: str, values: Sequence[Any], on_gpu: list[bool], transport: str
) -> CollectiveInputs:
    inputs = CollectiveInputs(device="gpu", transport=transport)
    for value, there in zip(values, on_gpu, strict=True):
        if there:
            source, restore = dlpack.to_cupy(value)
            inputs.at_once = inputs.at_once or dlpack.reads_at_once(value)
        else:
            # An array of a group that is mostly on the GPU, or device="/gpu:0".
            source, back = to_numpy(value)
            source, down = dlpack.upload(source)
            restore = partial(_converted, down, back)
        inputs.sources.append(source)
        inputs.restores.append(restore)
    # The GPU of the rank's first array; all later ones must be on it, too.
    this, arrays = world.current(), list[Any](inputs.sources)
    numbers = {int(array.device.id) for array in arrays}
    if this.gpu is None and len(numbers) == 1:
        this.gpu = Device(min(numbers), this.sets, lambda text: this.notice(text))
    if this.gpu is None or numbers != {this.gpu.number}:
        found = sorted(numbers | ({this.gpu.number} if this.gpu is not None else set()))
        raise UsageError(
            f"{kind} needs arrays on one GPU a rank: found GPUs {', '.join(map(str, found))}. "
            "Move them to one, or start a rank for each GPU."
        )
    inputs.gpu = this.gpu
    return inputs


def no_inputs(kind: str, transport: str | None, device: str) -> CollectiveInputs:
    """The inputs of a rank that only receives: an empty array, on the GPU if that is asked for."""
    want = read_placement(kind, transport, device) if transport or device else Placement()
    if want.memory == "gpu" or want.transport in ON_GPU:
        nothing, _ = dlpack.upload(np.empty(0, np.uint8))
        return _on_gpu(kind, [nothing], [True], want.transport)
    return _in_host_memory([np.empty(0, np.uint8)], want)


def _converted(down: Restore, back: Restore, out: Array) -> Any:
    return back(down(out))


class Handle:
    """The result of an ``_async`` function.

    Calls of one process set run in the order in which they were posted. No thread drives them: they
    progress while this rank polls, synchronizes or makes another call.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._world = world.current()
        self._epoch = self._world.epoch
        self._world.submit(call)

    def poll(self) -> bool:
        """True when the result is there; never waits.

        Raises:
            StaleHandle: the epoch of the call has ended.
            RankLeft: this rank has left another call of the epoch unfinished.
        """
        self._check()
        if not self._call.done:
            self._world.poll(self._call)
        return self._call.done

    def synchronize(self) -> Any:
        """Waits for the call and returns its result.

        Raises:
            StaleHandle: the epoch of the call has ended.
            CollectiveMismatch: the ranks passed different arguments.
            RankLeft: a rank will never make this call.
        """
        self._check()
        return self._world.join(self._call)

    def _check(self) -> None:
        if not self._call.done and self._epoch != self._world.epoch:
            raise StaleHandle(
                f"synchronize() needs a handle of this epoch: {self._call.spec.title} at "
                f"{self._call.site} was posted in an epoch that has ended: its cell has failed, or "
                "has not waited for it. Post it again, and wait for it in the same cell."
            )


def run(call: Call) -> Any:
    """Drives a call of this rank's world to its end and returns its result."""
    return world.current().run(call)


def poll(handle: Handle) -> bool:
    """True when the result of an ``_async`` call is there; never waits."""
    return _checked(handle, "poll").poll()


def synchronize(handle: Handle) -> Any:
    """Waits for an ``_async`` call and returns its result."""
    return _checked(handle, "synchronize").synchronize()


def _checked(handle: Any, op: str) -> Handle:
    if isinstance(handle, Handle):
        return handle
    raise UsageError(
        f"{op} expected the handle of one call, as allreduce_async returns it, found "
        f"{handle!r:.60}. Type: {op}(allreduce_async(x))"
    )
