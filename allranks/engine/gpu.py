"""How much of its GPU's memory is in use, asked of the driver without touching CUDA."""

from __future__ import annotations

from typing import Any


class Gpu:
    """The GPU that a rank was pinned to, or none.

    Args:
        device: as ``cuda:0 (GPU-…)``, or ``cpu``.
    """

    def __init__(self, device: str) -> None:
        self._uuid = device.partition("(")[2].removesuffix(")")
        self._handle: Any = None
        self._nvml: Any = None

    def used_nbytes(self) -> int:
        """Returns the bytes in use on it, by whomever; 0 where that cannot be known."""
        if not self._uuid:
            return 0
        try:
            if self._handle is None:
                import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

                pynvml.nvmlInit()
                self._nvml = pynvml
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        except Exception:  # no package, no driver, or a slice that the driver does not tell about
            self._uuid = ""
            return 0
