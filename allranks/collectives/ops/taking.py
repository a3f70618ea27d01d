"""What a call is given, as arrays of one place: host memory, or this rank's GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.arrays.libraries import Restore, to_numpy
from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.guard import Spec
from allranks.collectives.gpu import dlpack, placement
from allranks.collectives.gpu.device import Device
from allranks.errors import UsageError


@dataclass(slots=True)
class Taken:
    """A call's arrays, and how each result becomes what its input was."""

    sources: list[Array] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    device: str = ""
    """"gpu" or ""; the same on every rank, or the call is a mismatch."""
    transport: str = ""
    gpu: Device | None = None
    """This rank's GPU, where the arrays are on it."""
    at_once: bool = False
    """Whether a result's memory has to be ready when it becomes what its input was."""

    def spec(self, op: str, dtype: str, shape: tuple[object, ...], root: int = -1) -> Spec:
        """What must be the same on every rank of a call that moves them."""
        return Spec(op, "", dtype, shape, root, transport=self.transport, device=self.device)

    def copying(self, call: Call) -> AbstractContextManager[None]:
        """Where they are copied before they move: on a GPU, behind what made them."""
        return nullcontext() if self.gpu is None else self.gpu.copying(call)

    def marked(self, call: Call) -> Call:
        """The call that moves them: on a GPU, behind what has made them on the caller's stream."""
        return call if self.gpu is None else self.gpu.marked(call)

    def restored(self, outs: list[Array]) -> list[Any]:
        """The results, each as what its input was."""
        if self.at_once and self.gpu is not None:
            # One wait for all of them.
            outs = [dlpack.aligned(out) for out in outs]
            self.gpu.settle()
        return [restore(out) for restore, out in zip(self.restores, outs, strict=True)]

    def restored_alone(self, out: Array) -> Any:
        """The only result, as what its input was."""
        return self.restored([out])[0] if self.at_once else self.restores[0](out)


def take(
    kind: str, values: Sequence[Any], transport: str | None, device: str, *, host: bool = False
) -> Taken:
    """The arrays of a call, where they are to be moved.

    ``transport`` and ``device`` are as in `allreduce`; ``host``: what is on a GPU goes through host
    memory all the same.

    Raises:
        UsageError: they are not where ``transport`` needs them.
        MissingDependency: what a GPU needs is missing.
    """
    want = placement.read(kind, transport, device) if transport or device else placement.Placement()
    on_gpu: list[bool] = []
    if want.memory != "cpu":
        on_gpu = [type(value) is not np.ndarray and dlpack.is_on_gpu(value) for value in values]
        if want.transport and not want.memory and not all(on_gpu):
            raise UsageError(
                f"transport={want.transport!r} moves arrays that are on a GPU: found "
                f"{_where(values, on_gpu)}. Pass cupy.asarray(x), or device='/gpu:0'."
            )
        if want == placement.Placement() and any(on_gpu):
            want = placement.of_environment(kind)
            # Without cupy, torch and the others still know the way through the host.
            if not want.transport and any(map(dlpack.without_cupy, values)):
                want = placement.Placement("cpu")
        if want.memory == "cpu" or not (any(on_gpu) or want.memory == "gpu"):
            on_gpu = []
    if not on_gpu or host:
        return _in_host_memory(values, want if want.memory == "cpu" else placement.Placement())
    return _on_gpu(kind, values, on_gpu, want.transport)


def _in_host_memory(values: Sequence[Any], want: placement.Placement) -> Taken:
    taken = Taken(transport=want.transport)
    for value in values:
        source, restore = to_numpy(value)
        taken.sources.append(source)
        taken.restores.append(restore)
    return taken


def _on_gpu(kind: str, values: Sequence[Any], on_gpu: list[bool], transport: str) -> Taken:
    taken = Taken(device="gpu", transport=transport)
    for value, there in zip(values, on_gpu, strict=True):
        if there:
            source, restore = dlpack.take(value)
            taken.at_once = taken.at_once or dlpack.reads_at_once(value)
        else:
            # One of a group that is on the GPU otherwise, or all where the call says so.
            source, back = to_numpy(value)
            source, down = dlpack.upload(source)
            restore = _in_turn(down, back)
        taken.sources.append(source)
        taken.restores.append(restore)
    taken.gpu = device_of(world.current(), kind, taken.sources)
    return taken


def take_none(kind: str, transport: str | None, device: str) -> Taken:
    """For a rank that only receives: an empty array where the arguments say, numpy's otherwise."""
    want = placement.read(kind, transport, device) if transport or device else placement.Placement()
    if want.memory == "gpu" or want.transport in placement.ON_GPU:
        nothing, _ = dlpack.upload(np.empty(0, np.uint8))
        return _on_gpu(kind, [nothing], [True], want.transport)
    return _in_host_memory([np.empty(0, np.uint8)], want)


def device_of(this: world.World, kind: str, arrays: list[Any]) -> Device:
    """This rank's GPU: the one that its first array on a GPU was on.

    Raises:
        UsageError: an array is on another.
        MissingDependency: there is no driver, or no GPU.
    """
    numbers = {int(array.device.id) for array in arrays}
    if this.gpu is None and len(numbers) == 1:
        this.gpu = Device(min(numbers), this.sets, lambda text: this.notice(text))
    if this.gpu is None or numbers != {this.gpu.number}:
        found = sorted(numbers | ({this.gpu.number} if this.gpu is not None else set()))
        raise UsageError(
            f"{kind} needs arrays on one GPU a rank: found GPUs {', '.join(map(str, found))}. "
            "Move them to one, or start a rank for each GPU."
        )
    return this.gpu


def _in_turn(first: Callable[[Array], Array], then: Restore) -> Restore:
    return lambda out: then(first(out))


def _where(values: Sequence[Any], on_gpu: list[bool]) -> str:
    value = next(v for v, there in zip(values, on_gpu, strict=True) if not there)
    return f"one in host memory ({type(value).__name__})"
