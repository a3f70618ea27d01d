"""What is used of cupy and of NCCL, and the sentences where they are missing.

The protocols say which names, no more: a fake that has them stands in for the real ones in tests.

Source: cupy 14, ``cupy.cuda``, ``cupy.cuda.runtime`` and ``cupy.cuda.nccl``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from allranks.errors import MissingDependency

INSTALL = "pip install 'allranks[cuda12]', or 'allranks[cuda13]' for CUDA 13"


class Event(Protocol):
    """A mark in a stream."""

    ptr: int

    def record(self, stream: Stream) -> None:
        """Sets the mark behind what the stream has been given so far."""


class Stream(Protocol):
    """A queue of a GPU's work; in a ``with`` statement, where cupy's own work goes."""

    ptr: int

    def wait_event(self, event: Event) -> None:
        """What comes from now on begins once the event has happened."""

    def __enter__(self) -> Stream: ...
    def __exit__(self, *details: object) -> None: ...


class Communicator(Protocol):
    """``cupy.cuda.nccl.NcclCommunicator``. Counts are elements; the last number is a stream."""

    def allReduce(self, send: int, recv: int, n: int, dtype: int, op: int, stream: int, /) -> None:
        """ncclAllReduce."""

    def reduce(
        self, send: int, recv: int, n: int, dtype: int, op: int, root: int, stream: int, /
    ) -> None:
        """ncclReduce."""

    def broadcast(
        self, send: int, recv: int, n: int, dtype: int, root: int, stream: int, /
    ) -> None:
        """ncclBroadcast."""

    def reduceScatter(
        self, send: int, recv: int, n: int, dtype: int, op: int, stream: int, /
    ) -> None:
        """ncclReduceScatter."""

    def allGather(self, send: int, recv: int, n: int, dtype: int, stream: int, /) -> None:
        """ncclAllGather."""

    def send(self, buffer: int, n: int, dtype: int, peer: int, stream: int, /) -> None:
        """ncclSend."""

    def recv(self, buffer: int, n: int, dtype: int, peer: int, stream: int, /) -> None:
        """ncclRecv."""

    def check_async_error(self) -> None:
        """Raises where a call that was launched has failed since."""

    def abort(self) -> None:
        """Ends what is under way and frees the communicator; nobody else has to be there."""


class NcclModule(Protocol):
    """``cupy.cuda.nccl``."""

    available: bool

    def get_version(self) -> int:
        """As 22703 for 2.27.3."""

    def get_unique_id(self) -> bytes:
        """What the members of a new communicator must have in common."""

    def NcclCommunicator(self, members: int, unique: bytes, me: int, /) -> Communicator:
        """Returns once all members have called this."""

    def groupStart(self) -> None:
        """The calls from here on are launched together."""

    def groupEnd(self) -> None:
        """Launches them."""


class Runtime(Protocol):
    """``cupy.cuda.runtime``."""

    def getDeviceCount(self) -> int:
        """How many GPUs this process sees; raises without a driver."""

    def getDeviceProperties(self, device: int, /) -> dict[str, Any]:
        """``name``, ``uuid`` and more."""

    def deviceGetPCIBusId(self, device: int, /) -> str:
        """Where the GPU is plugged in; the slices of one GPU have it in common."""

    def eventQuery(self, event: int, /) -> int:
        """0 once the event has happened, 600 before; raises where the GPU has failed."""

    def eventElapsedTime(self, first: int, second: int, /) -> float:
        """Milliseconds between two events that have happened."""

    def memcpyAsync(self, to: int, source: int, nbytes: int, kind: int, stream: int, /) -> None:
        """Queues a copy; kind 1 is to the GPU, 2 is from it."""

    def hostRegister(self, address: int, nbytes: int, flags: int, /) -> None:
        """Pins memory of this process."""


class Cuda(Protocol):
    """``cupy.cuda``."""

    runtime: Runtime

    def Device(self, device: int, /) -> AbstractContextManager[object]:
        """Makes a GPU the current one."""

    def get_current_stream(self) -> Stream:
        """Where the caller's work goes."""

    # Last: from here on these names are no longer the protocols'.
    Stream: Callable[..., Any]
    """``Stream(non_blocking=True)``: a new stream."""
    Event: Callable[..., Any]
    """``Event(disable_timing=True)``: a new event."""


class Cupy(Protocol):
    """``cupy``."""

    cuda: Cuda

    def asarray(self, array: Any, /) -> Any:
        """An array on the current GPU."""

    def asnumpy(self, array: Any, /) -> Any:
        """An array in host memory; waits for the copy."""

    def ascontiguousarray(self, array: Any, /) -> Any:
        """The same in C order."""

    def empty(self, shape: Any, dtype: Any, /) -> Any:
        """An uninitialised array on the current GPU."""

    def from_dlpack(self, array: Any, /) -> Any:
        """Another library's array on a GPU, without a copy."""


def installed() -> Cupy:
    """The module cupy; raises `MissingDependency` without it."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        why = "" if isinstance(error, ModuleNotFoundError) and error.name == "cupy" else f" {error}"
        raise MissingDependency(
            f"arrays on a GPU need the package cupy on every rank.{why} {INSTALL}"
        ) from error
    # Before, an id of NCCL's was a tuple, and there was no bfloat16.
    if int(cupy.__version__.partition(".")[0]) < 14:
        raise MissingDependency(
            f"arrays on a GPU need cupy 14 or newer on every rank: found {cupy.__version__}. "
            f"{INSTALL}"
        )
    return cast("Cupy", cupy)


def load() -> Cupy:
    """The module cupy, with a GPU that it can use; raises `MissingDependency` without one."""
    cupy = installed()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        count, said = 0, str(error)
    else:
        said = "it counts no GPU"
    if count:
        return cupy
    if "NoDevice" in said or "no GPU" in said:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise MissingDependency(
            f"arrays on a GPU need one that this process may see: CUDA says {said}, and "
            f"CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}. "
            "nvidia-smi -L lists the GPUs of this host."
        )
    raise MissingDependency(
        f"arrays on a GPU need NVIDIA's driver, and CUDA says {said}. "
        "nvidia-smi shows the driver, if there is one: CUDA 12 needs 525 or newer, CUDA 13 needs "
        "580 or newer. Install it with this host's package manager, and start the ranks again."
    )


def load_nccl() -> NcclModule:
    """The module cupy.cuda.nccl; raises `MissingDependency` without a library behind it."""
    problem = ""
    try:
        nccl = cast("NcclModule", importlib.import_module("cupy.cuda.nccl"))
        if nccl.available and nccl.get_version():
            return nccl
    except Exception as error:  # a library that cannot be loaded fails in its own ways
        problem = f": {error}"
    raise MissingDependency(
        f"NCCL needs the library libnccl.so.2, which cupy did not find{problem}. "
        "pip install nvidia-nccl-cu12, or nvidia-nccl-cu13 for CUDA 13; never both"
    )
