"""What this machine's GPU, its libraries and its shared memory say, a line each."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def version(name: str) -> str:
    return str(getattr(importlib.import_module(name), "__version__", "found"))


def uuids() -> str:
    """By cupy, which cuts it at a zero, and by the driver."""
    import cupy

    raw, device = (ctypes.c_ubyte * 16)(), ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    cupy.cuda.runtime.getDeviceCount()
    codes = driver.cuDeviceGet(ctypes.byref(device), 0), driver.cuDeviceGetUuid_v2(raw, device)
    by_cupy = bytes(cupy.cuda.runtime.getDeviceProperties(0)["uuid"])
    return f"driver {bytes(raw).hex()} {codes}, cupy {by_cupy.hex()}"


def registered() -> str:
    """Pages of shared memory that is mapped, pinned, and pinned once more."""
    import cupy

    cupy.empty(1)
    area = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(area))
    cupy.cuda.runtime.hostRegister(at, 4 * mmap.PAGESIZE, 0)
    try:
        cupy.cuda.runtime.hostRegister(at, mmap.PAGESIZE, 0)
        again = "a second time as well"
    except RuntimeError as error:
        again = f"a second time refused: {error}"
    cupy.cuda.runtime.hostUnregister(at)
    return f"pinned; {again}"


def handle() -> str:
    """Whether memory may be handed to another process."""
    import cupy

    memory = cupy.empty(1 << 20, "u1")
    return f"{len(cupy.cuda.runtime.ipcGetMemHandle(memory.data.ptr))} bytes"


def nccl() -> str:
    from cupy.cuda import nccl as module

    comm = module.NcclCommunicator(1, module.get_unique_id(), 0)
    comm.check_async_error()
    comm.abort()
    return f"{module.get_version()}, one rank connects"


def name() -> str:
    import cupy

    runtime = cupy.cuda.runtime
    free, total = runtime.memGetInfo()
    found = runtime.getDeviceProperties(0)["name"].decode()
    return f"{runtime.getDeviceCount()} × {found}, {free >> 20} of {total >> 20} MiB free"


PROBES: dict[str, Callable[[], Any]] = {
    "python": lambda: sys.version.split()[0],
    **{
        each: (lambda each=each: version(each))
        for each in ("numpy", "cupy", "torch", "jax", "tensorflow", "mpi4py", "pynvml", "pytest")
    },
    "GPU": name,
    "UUID": uuids,
    "hostRegister": registered,
    "IPC": handle,
    "NCCL": nccl,
    "/dev/shm": lambda: f"{shutil.disk_usage('/dev/shm').free >> 20} MiB free",
}


def main() -> None:
    """Prints them."""
    for what, ask in PROBES.items():
        try:
            said = ask()
        except Exception as error:
            said = f"none: {type(error).__name__}: {error}"
        print(f"{what}: {said}", flush=True)


if __name__ == "__main__":
    main()
