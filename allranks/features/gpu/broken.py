"""Errors after which CUDA refuses every call of the process, until its end.

Source: CUDA runtime API, cudaError: "the process must be terminated and relaunched", or for
cudaErrorECCUncorrectable an error of the hardware.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from allranks.errors import TransportFailed

_BROKEN = re.compile(
    r"cudaError(?:IllegalAddress|LaunchFailure|LaunchTimeout|Assert|HardwareStackError"
    r"|IllegalInstruction|MisalignedAddress|InvalidAddressSpace|InvalidPc|ECCUncorrectable"
    r"|NvlinkUncorrectable|Contained)"
    r"|CUDA_ERROR_(?:ILLEGAL_ADDRESS|LAUNCH_FAILED|LAUNCH_TIMEOUT|ASSERT|HARDWARE_STACK_ERROR"
    r"|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|INVALID_ADDRESS_SPACE|INVALID_PC|ECC_UNCORRECTABLE"
    r"|NVLINK_UNCORRECTABLE|CONTAINED)"
    # torch has the texts without the names.
    r"|an illegal memory access was encountered|unspecified launch failure"
    r"|the launch timed out and was terminated|device-side assert triggered"
    r"|hardware stack error|an illegal instruction was encountered|misaligned address"
    r"|operation not supported on global/shared address space|invalid program counter"
    r"|uncorrectable ECC error encountered|uncorrectable NVLink error"
)
_LIBRARIES = {"cupy", "cupy_backends", "cupyx", "torch", "jax", "jaxlib", "tensorflow"}


def broken_by(error: BaseException | None) -> str:
    """Returns CUDA's name or words for an error that has broken the context; "" for others."""
    if error is None:
        return ""
    library = type(error).__module__.partition(".")[0] in _LIBRARIES
    if not (library or isinstance(error, TransportFailed) or _is_of_torch(error)):
        return ""
    found = _BROKEN.search(str(error))
    return found[0] if found else ""


def _is_of_torch(error: BaseException) -> bool:
    # Before 2.8 torch raises plain RuntimeErrors.
    return type(error) is RuntimeError and str(error).startswith("CUDA error: ")


def mute_finalizers(found: Callable[[str], object]) -> None:
    """Has Python print no such error of a finalizer; ``found`` gets the name instead.

    Every array and event of a broken context raises one when it is freed.
    """
    report: Callable[[Any], object] = sys.unraisablehook

    def muted(unraisable: sys.UnraisableHookArgs) -> None:
        if why := broken_by(unraisable.exc_value):
            found(why)
        else:
            report(unraisable)

    sys.unraisablehook = muted
