"""Memory that the ranks of one host share: segments, and arrays in them.

A `Segment` is one block of shared memory. A rank's `Window` is the segments from which it allocates
arrays that the other ranks of its host can read and write in place. Each rank allocates by itself,
at any time; the others map a segment when they first need it. Freed memory is used again, because
its pages are warm: a fresh page costs more than the copy it is for.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import threading
from bisect import bisect
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from allranks import own_files
from allranks.collectives.calls.call import NOWHERE, Place
from allranks.collectives.calls.rank_state import Board
from allranks.records.deferred import deferred

LINE = 64
"""Bytes of a cache line: words that different ranks write never share one."""


def _fence_by_lock() -> None:
    # A new lock each time: an interrupt between the calls cannot leave a shared one locked.
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


# x86-64 keeps stores in order and loads in order, so data written before a flag is seen before
# it. Elsewhere a release followed by an acquire orders them.
ORDERED = platform.machine() in ("x86_64", "AMD64")
fence: Callable[[], None] = (lambda: None) if ORDERED else _fence_by_lock


def rounded(nbytes: int) -> int:
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
        """The argument of `map_memory`, for other ranks of this host."""
        return self.file or f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """After this no other rank can map it; mappings stay."""
        if self.file:
            os.unlink(self.file)
            self.file = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def segment(nbytes: int, *, named: bool = False, populate: bool = False) -> Segment | None:
    """A `Segment`; None where this kind is not available, or memory is short."""
    try:
        return Segment(nbytes, named=named, populate=populate)
    except (OSError, AttributeError):
        return None


def _flags(populate: bool) -> int:
    return mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)


def map_memory(address: str, nbytes: int, *, populate: bool = False) -> mmap.mmap:
    # A descriptor of another process is a link.
    follow = 0 if address.startswith("/proc/") else os.O_NOFOLLOW
    fd = os.open(address, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | follow)
    try:
        # The owner of the name may have ended: objects that pass through it are unpickled.
        own_files.check_owner(fd, address)
        # Mapping all pages now takes a tenth of the time of one by one.
        return mmap.mmap(fd, nbytes, _flags(populate))
    finally:
        os.close(fd)


def attempt(address: str, nbytes: int) -> mmap.mmap | None:
    try:
        return map_memory(address, nbytes) if address else None
    except OSError:
        return None


def available() -> bool:
    """True where segments exist at all: Linux, with memfd or /dev/shm."""
    return sys.platform == "linux" and (hasattr(os, "memfd_create") or os.path.isdir("/dev/shm"))


def sweep() -> None:
    """Unlinks the files in /dev/shm of ranks that are no longer alive."""
    for path in Path("/dev/shm").glob("allranks-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with suppress(OSError):
                path.unlink()


WARM_BYTES = 64 << 10
"""Above this, memory that has been used before is so much faster that results live in it."""
_FIRST_BYTES = 16 << 20
Bytes = NDArray[np.uint8]


class Region(np.ndarray[Any, np.dtype[np.uint8]]):
    """A piece of a segment; it is free again when the last array on it is gone.

    Not a plain array, and neither is the segment that it is cut from: of a view of a view numpy
    keeps only the innermost array of the same type alive.
    """

    # Without a dictionary an array is made and freed sooner.
    __slots__ = ("where", "whole", "window")

    window: Window
    where: tuple[int, int, int]
    whole: ref[NDArray[Any]]
    """The array that was allocated on it, which starts where it starts."""


class Lease(ref[Region]):
    """The remains of a region: its segment, offset and bytes. A region ends in any thread, at any
    moment, and no Python code may run there: an interrupt at that moment would be raised in that
    code, as in any finalizer, and be lost. So the weak reference's callback is a deque's own
    method, and the allocator takes the memory back when it runs next.
    """

    __slots__ = ("where",)
    where: tuple[int, int, int]


class Borrowed(NamedTuple):
    """Shared memory of another library: where it is mapped, its descriptor and its life."""

    start: int
    nbytes: int
    fd: int
    is_alive: Callable[[], bool]


_MOST_NUMBER = (1 << 16) - 1
"""The highest number of a segment in a `Place`."""


def _has_own_memory(array: Any) -> bool:
    # numpy has allocated it, so it is in no window. To find its address takes longer.
    return type(array) is np.ndarray and array.flags.owndata


class Window:
    """The segments of one rank, and its view of the others'."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._lock = threading.RLock()
        self._leases: dict[tuple[int, int, int], Lease] = {}
        self._ended: deque[ref[Region]] = deque()
        self.starts: list[int] = []
        self._ends: list[int] = []
        self._free: list[list[tuple[int, int]]] = []
        self._segments: list[Segment] = []
        self._mapped: dict[tuple[int, int], Bytes] = {}
        self._borrowed: dict[int, Borrowed] = {}
        self._next_borrowed = Board.SEGMENTS

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int
    ) -> NDArray[Any] | None:
        """An uninitialised array in this rank's window; None where there is no memory for it."""
        with self._lock:
            region = self._allocate(max(LINE, -(-nbytes // LINE) * LINE))
        if region is None:
            return None
        array: NDArray[Any] = np.ndarray(shape, dtype, region)
        region.whole = ref(array)
        return array

    def place_of(self, array: NDArray[Any]) -> tuple[int, int]:
        """Segment, counted from 1, and offset of a contiguous array; (0, 0) outside the window."""
        if not self.starts and not self._borrowed:
            return 0, 0
        base = array.base
        if type(base) is Region and getattr(base, "window", None) is self and base.whole() is array:
            # Asking numpy for the address takes longer than all of this.
            return base.where[0] + 1, base.where[1]
        if _has_own_memory(array if base is None else base):
            return 0, 0
        at = array.__array_interface__["data"][0]
        for index, start in enumerate(self.starts):
            if start <= at and at + array.nbytes <= self._ends[index]:
                return index + 1, at - start
        for index, other in self._borrowed.items():
            inside = other.start <= at and at + array.nbytes <= other.start + other.nbytes
            # Other memory may have the address of memory that has ended.
            if inside and other.is_alive():
                return index + 1, at - other.start
        return 0, 0

    def borrow(self, memory: Borrowed) -> bool:
        """Adds shared memory of another library to the window; False if there are too many."""
        taken = {index % Board.BORROWED for index in self._borrowed}
        nexts = range(self._next_borrowed, self._next_borrowed + Board.BORROWED)
        free = [index for index in nexts if index % Board.BORROWED not in taken]
        if not free or free[0] >= _MOST_NUMBER:
            return False
        index = free[0]
        with deferred():
            self._next_borrowed = index + 1
            self._borrowed[index] = memory
            self.board.publish(index, memory.fd, memory.nbytes)
        return True

    def drop_ended(self) -> bool:
        """Withdraws borrowed memory that has ended, and unmaps what other ranks have withdrawn.
        Returns whether there was any; views of it that are kept elsewhere keep it alive.
        """
        for index, memory in list(self._borrowed.items()):
            if not memory.is_alive():
                with deferred():
                    self.board.withdraw(index)
                    del self._borrowed[index]
        borrowed = [at for at in list(self._mapped) if at[1] > Board.SEGMENTS]
        ended = [at for at in borrowed if not self.board.is_published(at[0], at[1] - 1)]
        for at in ended:
            del self._mapped[at]
        return bool(ended)

    def at(self, rank: int, segment: int, offset: int, nbytes: int) -> Bytes:
        mapped = self._mapped.get((rank, segment))
        if mapped is None:
            address, size = self.board.segment(rank, segment - 1)
            mapped = np.frombuffer(map_memory(address, size, populate=True), np.uint8)
            self._mapped[(rank, segment)] = mapped
        return mapped[offset : offset + nbytes]

    def publish_again(self, replaced: Collection[int]) -> None:
        """Publishes this rank's segments on a new board, after some of the ranks were replaced."""
        self._mapped = {at: view for at, view in self._mapped.items() if at[0] not in replaced}
        for index, own in enumerate(self._segments):
            self.board.publish(index, own.fd, own.nbytes)
        for index, other in self._borrowed.items():
            self.board.publish(index, other.fd, other.nbytes)

    def _allocate(self, nbytes: int) -> Region | None:
        while self._ended:
            lease = self._ended[0]
            assert isinstance(lease, Lease)
            # An interrupt may have left a lease here that a newer one has replaced.
            if self._leases.get(lease.where) is lease:
                if lease.where[2] == nbytes:
                    region = self._region(lease.where, lease)
                    if region is not None:
                        return region
                    continue
                with deferred():
                    del self._leases[lease.where]
                    self._give_back(lease.where)
            self._ended.popleft()
        with deferred():
            region = self._cut(nbytes)
            if region is None and self._grow(nbytes):
                region = self._cut(nbytes)
        return region

    def _cut(self, nbytes: int) -> Region | None:
        for index, free in enumerate(self._free):
            for place, (offset, size) in enumerate(free):
                if size >= nbytes:
                    free[place : place + 1] = (
                        [(offset + nbytes, size - nbytes)] if size > nbytes else []
                    )
                    return self._region((index, offset, nbytes))
        return None

    def _region(self, where: tuple[int, int, int], after: Lease | None = None) -> Region | None:
        """A region there; None if the memory that ``after`` left has been taken back meanwhile."""
        index, offset, nbytes = where
        whole = self._mapped[(self.board.rank, index + 1)]
        region = whole[offset : offset + nbytes]
        assert isinstance(region, Region)
        region.window, region.where = self, where
        lease, leases = Lease(region, self._ended.append), self._leases
        lease.where = where
        # No interrupt comes between these two lines: they call nothing and create nothing.
        if after is None or (where in leases and leases[where] is after):
            leases[where] = lease
            return region
        return None

    def _grow(self, nbytes: int) -> bool:
        have = sum(segment.nbytes for segment in self._segments)
        if len(self._segments) == Board.SEGMENTS:
            return False
        made = segment(max(nbytes, _FIRST_BYTES, min(have, 1 << 30)), populate=True)
        if made is None:
            return False
        view = np.frombuffer(made.memory, np.uint8)
        start = view.__array_interface__["data"][0]
        self._mapped[(self.board.rank, len(self._segments) + 1)] = view.view(Region)
        self._ends.append(start + made.nbytes)
        self.starts.append(start)  # last: another thread may look for the place of an array
        self._free.append([(0, made.nbytes)])
        self.board.publish(len(self._segments), made.fd, made.nbytes)
        self._segments.append(made)
        return True

    def _give_back(self, where: tuple[int, int, int]) -> None:
        segment, offset, nbytes = where
        free = self._free[segment]
        index = bisect(free, (offset, nbytes))
        free.insert(index, (offset, nbytes))
        # Joined with the piece behind it, then with the one before.
        for at in (index, index - 1):
            if 0 <= at < len(free) - 1:
                (start, size), (after, more) = free[at], free[at + 1]
                if start + size == after:
                    free[at : at + 2] = [(start, size + more)]


def place(source: tuple[int, int], out: tuple[int, int]) -> Place:
    """Places of a call's in- and output: both segment numbers in one word, and two offsets.
    `NOWHERE` unless both are in the window; they may be the same array.
    """
    if not source[0] or not out[0]:
        return NOWHERE
    return source[0] | out[0] << 16, source[1], out[1]


def in_staging(at: tuple[int, int]) -> Place:
    """The place of a member's staging buffer, for arrays outside the window."""
    return at[0] << 32, at[1], 0


def is_in_window(where: Place) -> bool:
    return 0 < where[0] < 1 << 32


def staging_of(where: Place) -> tuple[int, int]:
    """The argument of `in_staging`; (0, 0) for other places."""
    return where[0] >> 32, where[1]
