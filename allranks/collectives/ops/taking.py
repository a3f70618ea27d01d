"""What a call is given, as arrays of one place: host memory, or this rank's GPU. In every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives import world
from allranks.collectives.arrays.libraries import Restore, to_numpy
from allranks.collectives.gpu import kinds
from allranks.collectives.gpu import wanted as place
from allranks.collectives.gpu.device import device_of
from allranks.errors import UsageError

if TYPE_CHECKING:
    from allranks.collectives.calls.call import Call
    from allranks.collectives.gpu.api import Event

Array = NDArray[Any]


@dataclass(slots=True)
class Taken:
    """A call's arrays, and how each result becomes what its input was."""

    sources: list[Array] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    device: str = ""
    """"gpu" or ""; the same on every rank, or the call is a mismatch."""
    transport: str = ""

    def mark(self) -> Event | None:
        """For arrays on a GPU, an event behind what has made them on the caller's stream."""
        gpu = world.current().gpu
        return gpu.mark() if self.device and gpu is not None else None


def take(
    kind: str, values: Sequence[Any], transport: str | None, device: str, *, host: bool = False
) -> Taken:
    """The arrays of a call, where they are to be moved.

    Args:
        kind: the operation's name.
        values: what it was given.
        transport, device: as in `allreduce`.
        host: what is on a GPU goes through host memory all the same.

    Raises:
        UsageError: they are not where ``transport`` needs them.
        MissingDependency: what a GPU needs is missing.
    """
    way = place.way(kind, transport, device) if transport or device else place.Way()
    on_gpu: list[bool] = []
    if way.place != "cpu":
        on_gpu = [type(value) is not np.ndarray and kinds.is_on_gpu(value) for value in values]
        if way.transport and not way.place and not all(on_gpu):
            raise UsageError(
                f"transport={way.transport!r} moves arrays that are on a GPU: found "
                f"{_where(values, on_gpu)}. Pass cupy.asarray(x), or device='/gpu:0'."
            )
        if way == place.Way() and any(on_gpu):
            way = place.of_environment(kind)
            # Without cupy, torch and the others still know the way through the host.
            if not way.transport and any(map(kinds.without_cupy, values)):
                way = place.Way("cpu")
        if way.place == "cpu" or not (any(on_gpu) or way.place == "gpu"):
            on_gpu = []
    if not on_gpu or host:
        return _in_host_memory(values, way if way.place == "cpu" else place.Way())
    return _on_gpu(kind, values, on_gpu, way.transport)


def _in_host_memory(values: Sequence[Any], way: place.Way) -> Taken:
    taken = Taken(transport=way.transport)
    for value in values:
        source, restore = to_numpy(value)
        taken.sources.append(source)
        taken.restores.append(restore)
    return taken


def _on_gpu(kind: str, values: Sequence[Any], on_gpu: list[bool], transport: str) -> Taken:
    taken = Taken(device="gpu", transport=transport)
    for value, there in zip(values, on_gpu, strict=True):
        if there:
            source, restore = kinds.take(value)
        else:
            # One of a group that is on the GPU otherwise, or all where the call says so.
            source, back = to_numpy(value)
            source, down = kinds.upload(source)
            restore = _in_turn(down, back)
        taken.sources.append(source)
        taken.restores.append(restore)
    device_of(world.current(), kind, taken.sources)
    return taken


def take_none(kind: str, transport: str | None, device: str) -> Taken:
    """For a rank that only receives: an empty array where the arguments say, numpy's otherwise."""
    way = place.way(kind, transport, device) if transport or device else place.Way()
    if way.place == "gpu" or way.transport in place.ON_GPU:
        nothing, _ = kinds.upload(np.empty(0, np.uint8))
        return _on_gpu(kind, [nothing], [True], way.transport)
    return _in_host_memory([np.empty(0, np.uint8)], way)


@contextmanager
def copying(call: Call) -> Iterator[None]:
    """Where a call's arrays are copied before they move: on a GPU, behind what made them."""
    gpu = call.group.world.gpu
    if not call.spec.device or gpu is None:
        yield
        return
    with gpu.behind_caller(call) as stream:
        yield
        call.ready = gpu.event(stream)


def _in_turn(first: Callable[[Array], Array], then: Restore) -> Restore:
    return lambda out: then(first(out))


def _where(values: Sequence[Any], on_gpu: list[bool]) -> str:
    value = next(v for v, there in zip(values, on_gpu, strict=True) if not there)
    return f"one in host memory ({type(value).__name__})"
