"""FAKE cupy.cuda.runtime. ``SEAT`` says which GPU this rank has, if any; ``failing`` breaks it."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

from cupy.cuda import _queue

SEAT = "ALLRANKS_FAKE_GPU"
MISSING = {
    "no driver": "cudaErrorInsufficientDriver: CUDA driver version is insufficient for its runtime",
    "no GPU": "cudaErrorNoDevice: no CUDA-capable device is detected",
}
PIN, IPC = "ALLRANKS_FAKE_PIN", "ALLRANKS_FAKE_IPC"
failing: list[str] = []
capturing: list[int] = []
"""900, as often as somebody waits for the whole GPU while a graph is captured."""
registered: list[tuple[int, int]] = []
allocated: dict[int, tuple[int, int]] = {}
"""The file and the bytes of memory that other processes may open, by its address."""
opened: dict[int, int] = {}
"""The bytes of memory of other processes that is open, by its address in this one."""
TOTAL = 128 << 20


class CUDARuntimeError(RuntimeError):
    def __init__(self, said, status=999):
        super().__init__(said)
        self.status = status


def getDeviceCount():
    missing = MISSING.get(os.environ.get(SEAT, ""))
    if missing:
        raise CUDARuntimeError(missing)
    return 1


def getDeviceProperties(device):
    number = int(deviceGetPCIBusId(device).split(":")[1], 16)
    # A C string to cupy: it ends at the first zero, which every other GPU has here. cupy 14,
    # cupy_backends/cuda/api/runtime.pyx, getDeviceProperties.
    raw = bytes([0xFA, 0xCE] * 7 + [1 - number % 2, number + 1])
    return {"name": b"FAKE GPU", "uuid": raw.partition(b"\0")[0]}


def deviceGetPCIBusId(device):
    """Each rank its own GPU, or as many ranks on one as the variable says."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    return f"0000:{rank // int(os.environ.get(SEAT, '1')):02x}:00.0"


def eventQuery(pointer):
    if failing:
        raise CUDARuntimeError(failing[0])
    with _queue.driver:
        _queue.progress()
    return 0 if _queue._events[pointer].mark.has_happened() else 600


def eventElapsedTime(first, second):
    one, two = _queue._events[first], _queue._events[second]
    assert one.timed is two.timed is True, "cudaErrorInvalidResourceHandle: an event without timing"
    return (two.mark.done_at - one.mark.done_at) * 1e3


def memcpyAsync(to, source, nbytes, kind, stream):
    assert kind in (1, 2)
    _queue.push(lambda: ctypes.memmove(to, source, nbytes) and None, _queue.stream_of(stream))


def memGetInfo():
    return TOTAL, TOTAL


def malloc(size):
    file = os.memfd_create("fake-gpu")
    os.ftruncate(file, size)
    at = _mapped(file, size)
    allocated[at] = file, size
    return at


def ipcGetMemHandle(devPtr):
    """64 bytes. None in WSL 2: CUDA on WSL user guide, "Known Limitations"."""
    if os.environ.get(IPC) == "no":
        raise CUDARuntimeError("cudaErrorNotSupported: the fake was told so")
    return struct.pack("<3Q", os.getpid(), *allocated[devPtr]).ljust(64, b"\xf9")


def ipcOpenMemHandle(handle, flags=1):
    """Not by the process that has it, nor after that process has ended. CUDA runtime API."""
    assert len(handle) == 64
    pid, number, size = struct.unpack_from("<3Q", handle)
    if os.environ.get(IPC) == "not opened":
        raise CUDARuntimeError("cudaErrorMapBufferObjectFailed: the fake was told so")
    if pid == os.getpid():
        raise CUDARuntimeError("cudaErrorInvalidContext: it is this process's own")
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    except OSError as error:
        raise CUDARuntimeError(f"cudaErrorInvalidResourceHandle: {error}") from error
    at = _mapped(file, size)
    os.close(file)
    opened[at] = size
    return at


def ipcCloseMemHandle(devPtr):
    """Waits for the whole GPU, as far as is known; what reads it from then on breaks the process.

    CUDA runtime API, "Implicit synchronization"; the page of this call does not say.
    """
    size = opened.pop(devPtr)
    with _queue.driver:
        marks = _queue.marks()
        while any(mark.done_at is None for mark in marks):
            _queue.progress()
    assert not _libc.munmap(devPtr, size)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mapped(file, size):
    both = mmap.PROT_READ | mmap.PROT_WRITE
    return _libc.mmap(None, size, both, mmap.MAP_SHARED, file, 0)


def deviceSynchronize():
    """Until all streams have done what they have been given by now. CUDA runtime API.

    Not while one is captured: CUDA programming guide, "Prohibited and Unhandled Operations".
    """
    _queue.must_be_used()
    if capturing:
        raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: the fake captures", capturing[0])
    marks = _queue.marks()
    while any(mark.done_at is None for mark in marks):
        _queue.progress()


def hostRegister(address, nbytes, flags):
    """No page twice: CUDA runtime API, cudaHostRegister, cudaErrorHostMemoryAlreadyRegistered."""
    if os.environ.get(PIN) == "no":
        raise CUDARuntimeError("cudaErrorNotSupported: the fake was told so")
    first, last = _pages(address, nbytes)
    if any(first < end and start < last for start, end in (_pages(*r) for r in registered)):
        raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered: a page of it is pinned")
    registered.append((address, nbytes))


def hostUnregister(ptr):
    (found,) = (r for r in registered if r[0] == ptr)
    registered.remove(found)


def _pages(address, nbytes):
    return address // 4096, -(-(address + nbytes) // 4096)
