"""The operations as the contract suite calls them: with numpy's arrays, or with the same on a GPU.

ALLRANKS_TEST_KIND=cupy puts every array on the GPU before a call and fetches it after it, so that
one suite is the contract of every transport; ALLRANKS_TEST_TRANSPORTS names those that it tries.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

import allranks.collectives as collectives

ON_GPU = os.environ.get("ALLRANKS_TEST_KIND") == "cupy"
TRANSPORTS = os.environ.get("ALLRANKS_TEST_TRANSPORTS", "shared,mpi").split(",")
_MOVE = (
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "gather",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reduce",
    "reducescatter",
    "scatter",
)


class Handle:
    """A handle whose result is fetched from the GPU."""

    def __init__(self, handle: collectives.Handle) -> None:
        self.handle = handle

    def poll(self) -> bool:
        return self.handle.poll()

    def synchronize(self) -> Any:
        return down(self.handle.synchronize())


def up(value: Any) -> Any:
    """An array, or each of a list, on the GPU; anything else as it is."""
    import cupy

    if isinstance(value, np.ndarray):
        return cupy.asarray(value.astype(value.dtype.newbyteorder("=")))
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return [up(each) for each in value]
    if isinstance(value, list) and value and isinstance(value[0], list):
        return up(np.asarray(value))
    return value


def down(value: Any) -> Any:
    """The same in host memory."""
    import cupy

    if isinstance(value, cupy.ndarray):
        return cupy.asnumpy(value)
    if isinstance(value, (list, tuple)):
        return type(value)(down(each) for each in value)
    return value


def on_gpu(operation: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(operation)
    def moved(value: Any = None, *arguments: Any, **options: Any) -> Any:
        import cupy

        brought = up(value)
        out = options.get("out")
        if out is not None:
            options["out"] = brought if out is value else up(out)
        found = operation(brought, *arguments, **options)
        if out is not None:
            assert found is options["out"]
            np.copyto(out, down(found))
            return out
        if isinstance(found, collectives.Handle):
            return Handle(found)
        first = found[0] if isinstance(found, (list, tuple)) and found else found
        if isinstance(brought, cupy.ndarray) and first is not None:
            assert isinstance(first, cupy.ndarray), "a result came back to host memory"
        return down(found)

    return moved


class OnGpu:
    """The module ``allranks.collectives``, its operations on arrays on the GPU."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(collectives, name)
        if name in ("poll", "synchronize"):
            return lambda handle: getattr(handle, name)()
        return on_gpu(found) if name.removesuffix("_async") in _MOVE else found


c: Any = OnGpu() if ON_GPU else collectives
