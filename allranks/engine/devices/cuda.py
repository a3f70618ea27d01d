"""Whether a process has opened CUDA: what is forked from it can never use a GPU then."""

from __future__ import annotations

import ctypes
import os

_SUCCESS = 0
_DRIVER = "libcuda.so.1"


def is_open() -> bool:
    """True once this process has initialised CUDA; a library that merely loaded it has not.

    Source: CUDA driver API, cuInit, which every other call needs. What cuInit makes is lost in a
    fork: in the child every call of CUDA's fails, as cudaErrorInitializationError says.
    """
    try:
        # Only where it has been loaded already.
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        count = driver.cuDeviceGetCount
    except (OSError, AttributeError):
        return False
    # A stub of the driver, or one that finds no GPU, fails otherwise: there is nothing to lose.
    return int(count(ctypes.byref(ctypes.c_int()))) == _SUCCESS
