"""Arrays that the other ranks of this host can read and write where they lie.

Each rank allocates from segments of its own, by itself, whenever it likes; the others map a
segment when they first need it. Memory that is given back is used again, so that its pages are
warm: a fresh page costs more than the copy it is for.
"""

from __future__ import annotations

import threading
from bisect import bisect
from collections import deque
from collections.abc import Collection
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.calls.board import Board
from allranks.collectives.calls.call import NOWHERE, Place
from allranks.collectives.host.memory import LINE, Segment, attach, segment
from allranks.records.deferred import deferred

WARM_BYTES = 64 << 10
"""Above this, memory that has been used before is so much faster that results live in it."""
_FIRST_BYTES = 16 << 20
Bytes = NDArray[np.uint8]


class Region(np.ndarray[Any, np.dtype[np.uint8]]):
    """A piece of a segment; it is free again when the last array on it is gone.

    Not a plain array, and neither is the segment that it is cut from: of a view of a view numpy
    keeps only the innermost array of the same type alive.
    """

    window: Window
    where: tuple[int, int, int]
    whole: ref[NDArray[Any]]
    """The array that was handed out on it, which starts where it starts."""


class Lease(ref[Region]):
    """What a region leaves behind: its segment, offset and bytes.

    A region ends in any thread, at any moment, where no Python code may run: an interrupt that
    came just then would be raised in that code, as in any finalizer, and be lost. So what is
    called at its end is a deque's own method; the allocator takes the memory back when it runs
    next.
    """

    __slots__ = ("where",)
    where: tuple[int, int, int]


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
        if not self.starts:
            return 0, 0
        base = array.base
        if type(base) is Region and getattr(base, "window", None) is self and base.whole() is array:
            # Asking numpy for the address takes longer than all of this.
            return base.where[0] + 1, base.where[1]
        at = array.__array_interface__["data"][0]
        for index, start in enumerate(self.starts):
            if start <= at and at + array.nbytes <= self._ends[index]:
                return index + 1, at - start
        return 0, 0

    def at(self, rank: int, segment: int, offset: int, nbytes: int) -> Bytes:
        """What lies at a place in a rank's window."""
        mapped = self._mapped.get((rank, segment))
        if mapped is None:
            address, size = self.board.segment(rank, segment - 1)
            mapped = np.frombuffer(attach(address, size, populate=True), np.uint8)
            self._mapped[(rank, segment)] = mapped
        return mapped[offset : offset + nbytes]

    def show_again(self, replaced: Collection[int]) -> None:
        """Shows this rank's segments on a board that is new, as are some of the ranks."""
        self._mapped = {at: view for at, view in self._mapped.items() if at[0] not in replaced}
        for index, own in enumerate(self._segments):
            self.board.publish(index, own.fd, own.nbytes)

    def _allocate(self, nbytes: int) -> Region | None:
        while self._ended:
            lease = self._ended[0]
            assert isinstance(lease, Lease)
            # One that another has followed is over; an interrupt may have left it here.
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
        """The region there; None where a finalizer has had what ``after`` left."""
        index, offset, nbytes = where
        whole = self._mapped[(self.board.rank, index + 1)]
        region = whole[offset : offset + nbytes].view(Region)
        region.window, region.where = self, where
        lease, leases = Lease(region, self._ended.append), self._leases
        lease.where = where
        # Nothing comes between these two lines: they call nothing and make nothing.
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
        self.starts.append(start)
        self._ends.append(start + made.nbytes)
        self._free.append([(0, made.nbytes)])
        self.board.publish(len(self._segments), made.fd, made.nbytes)
        self._segments.append(made)
        return True

    def _give_back(self, where: tuple[int, int, int]) -> None:
        segment, offset, nbytes = where
        free = self._free[segment]
        index = bisect(free, (offset, nbytes))
        free.insert(index, (offset, nbytes))
        self._join(free, index)
        self._join(free, index - 1)

    @staticmethod
    def _join(free: list[tuple[int, int]], index: int) -> None:
        if 0 <= index < len(free) - 1:
            (offset, size), (after, more) = free[index], free[index + 1]
            if offset + size == after:
                free[index : index + 2] = [(offset, size + more)]


def place(source: tuple[int, int], out: tuple[int, int]) -> Place:
    """Where a call's in- and output lie, in one segment number and two offsets.

    Both have to be in the window; they may be the same.
    """
    if not source[0] or not out[0]:
        return NOWHERE
    return source[0] | out[0] << 16, source[1], out[1]
