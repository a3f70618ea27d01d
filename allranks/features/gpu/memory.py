"""The memory of a rank's GPU: its use, by the driver's interface without CUDA, a report if it runs
out, and the end of what a failed cell has used.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from allranks.collectives.gpu import dlpack

_OUT_OF_MEMORY = {
    ("cupy", "OutOfMemoryError"),
    ("torch", "OutOfMemoryError"),
    ("tensorflow", "ResourceExhaustedError"),
}
_LIBRARIES = ("cupy", "torch", "tensorflow", "jax")
#: How long to wait for arrays that another library has dropped: its kernels may still read them.
_LENT_SECONDS = 5.0


class GpuUse(NamedTuple):
    """The driver's figures, of all processes; -1 for those that it does not report for a slice."""

    used_nbytes: int = 0
    total_nbytes: int = 0
    percent: int = -1
    celsius: int = -1
    own_nbytes: int = 0
    """What this process uses; 0 where the driver reports no processes, or other pids."""


class PinnedGpu:
    """The GPU with a UUID, or none with ""."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self._handle: Any = None
        self._nvml: Any = None

    def _open(self) -> bool:
        if self._handle is None and self.uuid:
            try:
                import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
                self._nvml = pynvml
            except Exception:  # no package, no driver, or a GPU that the driver has lost
                self.uuid = ""
        return self._handle is not None

    def use(self) -> GpuUse:
        # Zeros where the driver cannot be reached.
        if not self._open():
            return GpuUse()
        nvml, handle = self._nvml, self._handle
        memory, percent, celsius = None, -1, -1
        with suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        with suppress(nvml.NVMLError):  # not reported for a slice
            percent = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        with suppress(nvml.NVMLError):
            celsius = int(nvml.nvmlDeviceGetTemperature(self._whole(), nvml.NVML_TEMPERATURE_GPU))
        if memory is None:
            return GpuUse(percent=percent, celsius=celsius)
        own = sum(nbytes for pid, nbytes in self.processes() if pid == os.getpid())
        return GpuUse(int(memory.used), int(memory.total), percent, celsius, own)

    def _whole(self) -> Any:
        # The GPU of a slice has the thermometer.
        if not self.uuid.startswith("MIG-"):
            return self._handle
        return self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)

    def name(self) -> str:
        if self._open():
            with suppress(self._nvml.NVMLError):
                name = self._nvml.nvmlDeviceGetName(self._handle)
                return name.decode() if isinstance(name, bytes) else str(name)
        return "GPU"

    def processes(self) -> list[tuple[int, int]]:
        # The pid and the bytes of each; 0 bytes where the driver does not report them.
        if self._open():
            with suppress(self._nvml.NVMLError):
                found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
                return [(int(each.pid), int(each.usedGpuMemory or 0)) for each in found]
        return []

    def out_of_memory(self, rank: int, pid: int, sharers: dict[int, int]) -> str:
        """Returns a text: the rank that ran out of memory, the GPU, and the other processes on it.
        ``sharers`` are the other ranks that are pinned to this GPU, by pid.
        """
        use, processes = self.use(), self.processes()
        said = f"rank {rank} is out of memory on {self.name()} ({self.uuid})"
        if use.total_nbytes:
            said += f": {_gib(use.used_nbytes)} of {_gib(use.total_nbytes)} are in use"
        others = []
        for other, nbytes in processes:
            if other != pid:
                who = f"rank {sharers[other]}" if other in sharers else _process(other)
                others.append(f"{who} ({_gib(nbytes)})" if nbytes else who)
        # In a container the driver may report other pids: then ranks are named without bytes.
        found = [other for other, _ in processes]
        rest = [sharer for other, sharer in sharers.items() if other not in found]
        others += [f"rank {sharer}" for sharer in sorted(rest)]
        if not others:
            return f"{said}. No other process uses it."
        return f"{said}. Also using it: {', '.join(others)}."


def is_out_of_memory(error: BaseException) -> bool:
    # Each library has an exception, or words, of its own.
    for kind in type(error).__mro__:
        if (kind.__module__.partition(".")[0], kind.__name__) in _OUT_OF_MEMORY:
            return True
    of_jax = type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError")
    return of_jax and "RESOURCE_EXHAUSTED" in str(error)[:200]


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _process(pid: int) -> str:
    with suppress(psutil.Error):
        return f"{psutil.Process(pid).name()}, pid {pid}"
    # Of another container, perhaps: the driver counts pids of the host.
    return f"pid {pid}"


def release(error: BaseException) -> None:
    """Forgets the local variables of a failed cell's calls, and gives unused GPU memory back.

    Variables of the cell itself stay. Libraries keep freed memory in pools for themselves: the
    other ranks of a shared GPU need it, and so do the other libraries of this rank.
    """
    if not any(name in sys.modules for name in _LIBRARIES):
        return
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        # The last exception has the frames, and these have the variables.
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
    if isinstance(error, KeyboardInterrupt) and _works():
        return  # what follows would wait for that work
    # Before the pools are emptied, into which it returns.
    dlpack.wait_for_exports(_LENT_SECONDS)
    # A GPU that has failed has no memory to give back.
    with suppress(Exception):
        _empty_pools()


def _works() -> bool:
    """Whether a GPU still does what cupy or torch has given it in the current stream."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    try:
        if cupy is not None and not cupy.cuda.get_current_stream().done:
            return True
        on_gpu = torch is not None and torch.cuda.is_initialized()
        return on_gpu and not torch.cuda.current_stream().query()  # type: ignore[union-attr]
    except Exception:  # the GPU has failed, or there is none
        return False


def _empty_pools() -> None:
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None and cupy.is_available():
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
