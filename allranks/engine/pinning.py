"""Shows a rank its own GPU only, before anything can open CUDA, and limits memory on a shared one.

One way for every library: `CUDA_VISIBLE_DEVICES` with the UUID of a GPU or of a slice. Each then
finds one GPU, number 0.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence

HIDDEN = "-1"
#: A value of TF_CPP_MIN_LOG_LEVEL for ranks without a GPU: only fatal errors. TensorFlow reports at
#: length that it finds no CUDA.
QUIET = "3"
#: torch warns of each connection that ends, with a stack of C++; ranks report the cause instead.
QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
#: The rest is for CUDA's context and for the libraries' code, which these limits do not count.
_SHARED_PERCENT = 90
_DRIVER_SECONDS = 20.0
_SUCCESS = 0
_DRIVER = "libcuda.so.1"


def visible() -> tuple[str, ...]:
    """Returns the values of ``CUDA_VISIBLE_DEVICES`` for one GPU each; none without a driver.

    A scheduler that gives a job some of a host's GPUs sets that variable.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(filter(None, (part.strip() for part in given.split(","))))
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_DRIVER_SECONDS,
            check=True,
        )
    except FileNotFoundError:
        return ()
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"expected nvidia-smi to name the GPUs, found {error}: ranks are pinned to none"
        print(problem, file=sys.stderr)
        return ()
    return tuple(asked.stdout.split())


def sharers(devices: Sequence[str], local: int, local_size: int) -> tuple[int, ...]:
    # Ranks take the devices in turn.
    return tuple(range(local % len(devices), local_size, len(devices))) if devices else (local,)


def pinning(devices: Sequence[str], local: int, local_size: int) -> tuple[str, dict[str, str]]:
    """Returns a rank's device, as ``cuda:0 (GPU-…)`` or ``cpu``, and the variables that pin it.

    Ranks take the host's ``devices``, UUIDs, in turn; ``-1`` hides all of them.
    """
    if not devices:
        return "cpu", {}
    uuid = devices[local % len(devices)]
    if uuid == HIDDEN:
        return "cpu", {"CUDA_VISIBLE_DEVICES": HIDDEN}
    limits = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "JAX_LOCAL_DEVICE_IDS": "0"}
    together = len(sharers(devices, local, local_size))
    if together > 1:
        limits |= {
            "CUPY_GPU_MEMORY_LIMIT": f"{_SHARED_PERCENT // together}%",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{_SHARED_PERCENT / together / 100:.2f}",
        }
    return f"cuda:0 ({uuid})", {"CUDA_VISIBLE_DEVICES": uuid} | limits


def apply(environment: MutableMapping[str, str], settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        if name == "CUDA_VISIBLE_DEVICES":
            environment[name] = value
        else:
            # A limit that the user has set stays.
            environment.setdefault(name, value)


def is_cuda_open() -> bool:
    """Whether this process has initialised CUDA; a library that merely loaded it has not.

    A process that is forked from one that has initialised CUDA cannot use a GPU: all calls of CUDA
    fail there with cudaErrorInitializationError. Source: CUDA driver API, cuInit, which every other
    call needs.
    """
    try:
        # Only where it has been loaded already.
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        count = driver.cuDeviceGetCount
    except (OSError, AttributeError):
        return False
    # A stub of the driver, or one that finds no GPU, fails too: then there is no state to lose.
    return int(count(ctypes.byref(ctypes.c_int()))) == _SUCCESS
