"""Sleeps until another process changes a word in shared memory: Linux's futex."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from time import sleep
from typing import Any

_SYSTEM_CALLS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF
_SHORT_SECONDS = 5e-5


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def _system_call() -> Callable[..., Any] | None:
    number = _SYSTEM_CALLS.get(platform.machine())
    if sys.platform != "linux" or number is None or sys.maxsize < 1 << 32:
        return None
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    word, pointer = ctypes.c_uint32, ctypes.c_void_p
    # Without types, ctypes would pass the addresses as 32-bit numbers.
    call.argtypes = [ctypes.c_long, pointer, ctypes.c_int, word, pointer]
    return lambda *arguments: call(number, *arguments)


_call = _system_call()


def wait(address: int, value: int, seconds: float) -> None:
    """Sleeps for less than a second, until `wake`, unless the 32 bits there are not ``value``."""
    # Without futexes no rank can end the sleep, so it is short.
    if _call is None:
        sleep(min(seconds, _SHORT_SECONDS))
    else:
        _call(address, _WAIT, value & 0xFFFFFFFF, ctypes.byref(_Time(0, int(seconds * 1e9))))


def wake(address: int) -> None:
    """Wakes the processes that sleep there."""
    if _call is not None:
        _call(address, _WAKE, _ALL, None)
