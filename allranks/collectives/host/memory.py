"""Memory that the ranks of one host share."""

from __future__ import annotations

import mmap
import os
import platform
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

LINE = 64
"""Bytes of a cache line: words that different ranks write never share one."""


def _fence_by_lock() -> None:
    # A lock of its own: an interrupt between the two leaves nothing behind.
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


# x86-64 keeps stores in order and loads in order, so data written before a flag is seen before
# it. Elsewhere a release followed by an acquire orders them.
ORDERED = platform.machine() in ("x86_64", "AMD64")
fence: Callable[[], None] = (lambda: None) if ORDERED else _fence_by_lock


def rounded(nbytes: int) -> int:
    """The size of the segment that holds so many bytes."""
    return max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)


class Segment:
    """A block of zeroed memory, mapped here and mappable by other ranks of this host.

    It has no name in any file system (memfd), so nothing can leak: the kernel frees it with the
    last process that maps it, however that process ended. Where memfd is missing, or peers may
    not open each other's descriptors, a file in /dev/shm is used and unlinked once all ranks
    have mapped it.
    """

    def __init__(self, nbytes: int, *, named: bool = False, populate: bool = False) -> None:
        self.nbytes = rounded(nbytes)
        self.file: str | None = None
        if named:
            self.file = f"/dev/shm/allranks-{os.getpid()}-{os.urandom(6).hex()}"
            self.fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        else:
            self.fd = os.memfd_create("allranks")
        try:
            # tmpfs is sparse: without this, a full /dev/shm is a SIGBUS at the first write.
            os.posix_fallocate(self.fd, 0, self.nbytes)
        except OSError:
            self.close()
            raise
        self.memory = mmap.mmap(self.fd, self.nbytes, _flags(populate))

    @property
    def address(self) -> str:
        """What another rank of this host passes to `attach`."""
        return self.file or f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Nobody can attach any more; what is mapped stays mapped."""
        if self.file:
            os.unlink(self.file)
            self.file = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def segment(nbytes: int, *, named: bool = False, populate: bool = False) -> Segment | None:
    """A `Segment`; None where there can be none of the kind, or no memory is left for it."""
    try:
        return Segment(nbytes, named=named, populate=populate)
    except (OSError, AttributeError):
        return None


def _flags(populate: bool) -> int:
    return mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)


def attach(address: str, nbytes: int, *, populate: bool = False) -> mmap.mmap:
    """Maps a segment that another rank of this host created.

    ``populate`` enters all of its pages now, at a tenth of what they cost one by one.
    """
    fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, nbytes, _flags(populate))
    finally:
        os.close(fd)


def attempt(address: str, nbytes: int) -> mmap.mmap | None:
    """The same; None where there is none at the address, or it cannot be opened from here."""
    try:
        return attach(address, nbytes) if address else None
    except OSError:
        return None


def available() -> bool:
    """True where segments exist at all: Linux, with memfd or /dev/shm."""
    return sys.platform == "linux" and (hasattr(os, "memfd_create") or os.path.isdir("/dev/shm"))


def sweep() -> None:
    """Unlinks files that ranks which are no longer alive left in /dev/shm."""
    try:
        names = [name for name in os.listdir("/dev/shm") if name.startswith("allranks-")]
    except OSError:
        return
    for name in names:
        pid = name.split("-")[1]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            try:
                os.unlink(f"/dev/shm/{name}")
            except OSError:
                continue


def of_open_mpi() -> list[str]:
    """Returns the paths of the files that Open MPI shares between the ranks of this host.

    mpiexec removes them. Of a process that is the only one to its MPI nobody does.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r"(/\S*/sm_segment\.\S+)$", maps, re.MULTILINE)))
