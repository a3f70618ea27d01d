"""The parts of cupy and NCCL that are used here, and the errors where one of them is missing.

The protocols name only what is used: a fake with these names replaces the real modules in tests.

Source: cupy 14, ``cupy.cuda``, ``cupy.cuda.runtime`` and ``cupy.cuda.nccl``; nccl.h.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from allranks.errors import MissingDependency

BYTES = 1
"""ncclUint8."""
IN_PROGRESS = 7
"""ncclInProgress."""
INSTALL = "pip install 'allranks[cuda12]', or 'allranks[cuda13]' for CUDA 13"


class CudaEvent(Protocol):
    """An event: a mark in a stream."""

    ptr: int

    def record(self, stream: Stream) -> None: ...


class Stream(Protocol):
    """A queue of a GPU's work; within a ``with`` statement, the one for cupy's own work."""

    ptr: int

    def wait_event(self, event: CudaEvent) -> None: ...
    def __enter__(self) -> Stream: ...
    def __exit__(self, *details: object) -> None: ...


class Communicator(Protocol):
    """``cupy.cuda.nccl.NcclCommunicator``. Counts are elements; the last number is a stream."""

    def allReduce(
        self, send: int, recv: int, n: int, dtype: int, op: int, stream: int, /
    ) -> None: ...
    def reduce(
        self, send: int, recv: int, n: int, dtype: int, op: int, root: int, stream: int, /
    ) -> None: ...
    def broadcast(
        self, send: int, recv: int, n: int, dtype: int, root: int, stream: int, /
    ) -> None: ...
    def reduceScatter(
        self, send: int, recv: int, n: int, dtype: int, op: int, stream: int, /
    ) -> None: ...
    def allGather(self, send: int, recv: int, n: int, dtype: int, stream: int, /) -> None: ...
    def send(self, buffer: int, n: int, dtype: int, peer: int, stream: int, /) -> None: ...
    def recv(self, buffer: int, n: int, dtype: int, peer: int, stream: int, /) -> None: ...

    def check_async_error(self) -> None:
        """Raises if launched work has failed, and a KeyError while it is being launched."""

    def abort(self) -> None:
        """Ends work under way and frees the communicator; no other member needs to take part."""


class NcclModule(Protocol):
    """``cupy.cuda.nccl``."""

    available: bool

    def get_version(self) -> int:
        """The version, as 22703 for 2.27.3."""

    def get_unique_id(self) -> bytes: ...

    def NcclCommunicator(self, members: int, unique: bytes, me: int, /) -> Communicator:
        """A new communicator; returns once all members have called this."""

    def groupStart(self) -> None: ...
    def groupEnd(self) -> None: ...


class Runtime(Protocol):
    """``cupy.cuda.runtime``."""

    def getDeviceCount(self) -> int: ...

    def getDeviceProperties(self, device: int, /) -> dict[str, Any]:
        """``name``, ``uuid`` and more."""

    def deviceGetPCIBusId(self, device: int, /) -> str:
        """The GPU's place on the bus, which is the same for all slices of one GPU."""

    def eventQuery(self, event: int, /) -> int:
        """0 once the event has happened, 600 before; raises if the GPU has failed."""

    def eventElapsedTime(self, first: int, second: int, /) -> float:
        """Milliseconds between two events that have happened."""

    def memcpyAsync(self, to: int, source: int, nbytes: int, kind: int, stream: int, /) -> None:
        """Queues a copy; kind 1 is to the GPU, 2 is from it."""

    def deviceSynchronize(self) -> None: ...

    def memGetInfo(self) -> tuple[int, int]:
        """The free bytes of the GPU, and all."""

    def malloc(self, nbytes: int, /) -> int: ...

    def ipcGetMemHandle(self, address: int, /) -> bytes:
        """What other processes open the memory at this address with; raises if CUDA has no such."""

    def ipcOpenMemHandle(self, handle: bytes, /) -> int:
        """The address, in this process, of memory of another one."""

    def ipcCloseMemHandle(self, address: int, /) -> None:
        """Ends what `ipcOpenMemHandle` began; may wait for all work of the GPU."""

    def hostRegister(self, address: int, nbytes: int, flags: int, /) -> None:
        """Pins whole pages of this process's memory; none of them may be pinned already."""

    def hostUnregister(self, address: int, /) -> None: ...


class Current(AbstractContextManager[object], Protocol):
    """``cupy.cuda.Device``: within it this GPU is the thread's current one."""

    def use(self) -> None: ...


class Cuda(Protocol):
    """``cupy.cuda``."""

    runtime: Runtime

    def Device(self, device: int, /) -> Current: ...

    def get_current_stream(self) -> Stream:
        """The stream of the caller's work."""

    # Last, because from here on these names no longer mean the protocols.
    Stream: Callable[..., Any]
    """``Stream(non_blocking=True)``: a new stream."""
    Event: Callable[..., Any]
    """``Event(disable_timing=True)``: a new event."""
    UnownedMemory: Callable[..., Any]
    """``UnownedMemory(address, nbytes, owner, device)``: memory that ``owner`` keeps alive."""
    MemoryPointer: Callable[..., Any]
    """``MemoryPointer(memory, offset)``."""


class Pool(Protocol):
    """``cupy.cuda.MemoryPool``."""

    def get_limit(self) -> int:
        """The most bytes that it may hold; 0 for no limit."""

    def set_limit(self, size: int) -> None: ...


class Cupy(Protocol):
    """``cupy``."""

    cuda: Cuda

    def get_default_memory_pool(self) -> Pool: ...

    def asarray(self, array: Any, /) -> Any: ...

    def asnumpy(self, array: Any, /) -> Any:
        """An array in host memory; waits for the copy."""

    def ascontiguousarray(self, array: Any, /) -> Any: ...
    def empty(self, shape: Any, dtype: Any, /) -> Any: ...
    def from_dlpack(self, array: Any, /) -> Any: ...

    ndarray: Callable[..., Any]
    """``ndarray(shape, dtype, pointer)``: an array over existing memory."""


def installed() -> Cupy:
    """The module cupy; raises `MissingDependency` without it."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        why = "" if isinstance(error, ModuleNotFoundError) and error.name == "cupy" else f" {error}"
        raise MissingDependency(
            f"arrays on a GPU need the package cupy on every rank.{why} {INSTALL}"
        ) from error
    # Older versions have no bfloat16, and their NCCL ids are tuples.
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
        count, problem = 0, str(error)
    else:
        problem = "it counts no GPU"
    if count:
        return cupy
    if "NoDevice" in problem or "no GPU" in problem:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise MissingDependency(
            f"arrays on a GPU need one that this process may see: CUDA says {problem}, and "
            f"CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}. "
            "nvidia-smi -L lists the GPUs of this host."
        )
    raise MissingDependency(
        f"arrays on a GPU need NVIDIA's driver, and CUDA says {problem}. "
        "nvidia-smi shows the driver, if there is one: CUDA 12 needs 525 or newer, CUDA 13 needs "
        "580 or newer. Install it with this host's package manager, and start the ranks again."
    )


def load_nccl() -> NcclModule:
    """cupy's module for NCCL; raises `MissingDependency` without a library behind it."""
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
