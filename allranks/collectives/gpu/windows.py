"""Memory on the GPU that this rank shares with other processes, and what it has opened of theirs.

CUDA leaves open what happens to memory that is freed, or whose process ends, while others have it
open. So a window is never freed: a group that ends leaves it to the next one. What was opened is
closed when the epoch ends, and as soon as the GPU has done all that it was given: a close may wait
for all of that, inside the driver.

Source: CUDA runtime API, cudaIpcGetMemHandle, cudaIpcOpenMemHandle, cudaIpcCloseMemHandle,
cudaFree; CUDA programming guide, "Interprocess Communication".
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from allranks.collectives.gpu.cupy_api import Cupy
from allranks.records.deferred import deferred

_MOST_BYTES, _PART = 256 << 20, 64
"""A window takes a 64th of the GPU's memory, and not more than these bytes: with more, the rounds
of a call would cost nothing beside its copies."""
_ALIGNED = 2 << 20
"""Of a smaller piece CUDA may share the memory around it too."""


class _Closing(NamedTuple):
    """Windows of other ranks that are to be closed."""

    opened: list[int]
    unused: Callable[[], bool]
    """Whether the GPU has done all that could use them, or write to this rank's own."""


# Not in a world: those of some of the ranks may end with a cell, and the process keeps their
# windows.
_spare: defaultdict[int, list[int]] = defaultdict(list)
"""For each GPU the windows of this process that no group uses."""
_closing: list[_Closing] = []


class GpuWindows:
    """The windows of a world's rank on its GPU, by group, and those that it opens and closes."""

    def __init__(self, cupy: Cupy, number: int) -> None:
        self._cupy, self._number = cupy, number
        self._own: dict[int, int] = {}
        """Their addresses."""
        weakref.finalize(self, _leave, number, self._own).atexit = False
        self.reported = False
        """Whether the user knows that no memory can be shared."""

    def size(self) -> int:
        """The bytes of a window."""
        with self._cupy.cuda.Device(self._number):
            _, whole = self._cupy.cuda.runtime.memGetInfo()
        return min(_MOST_BYTES, max(1, whole // _PART // _ALIGNED) * _ALIGNED)

    def own(self, group: int) -> int:
        """The address of a group's window; RuntimeError if the GPU has no memory for it."""
        if group not in self._own:
            spare = _spare[self._number]
            self._own[group] = spare.pop() if spare else self._allocated()
        return self._own[group]

    def _allocated(self) -> int:
        nbytes = self.size()
        with self._cupy.cuda.Device(self._number):
            # Not from the pool, where memory may be a part of what CUDA has allocated: a handle is
            # that of the whole.
            at = self._cupy.cuda.runtime.malloc(nbytes)
            pool = self._cupy.get_default_memory_pool()
            # The window is a part of this rank's share of the memory, which limits the pool.
            if limit := pool.get_limit():
                pool.set_limit(size=max(1, limit - nbytes))
        return at

    def forget(self, group: int) -> None:
        """Leaves the window of a group that has ended to the next one."""
        if group in self._own:
            _spare[self._number].append(self._own.pop(group))

    def handle(self, group: int) -> bytes:
        """What other processes open the window of a group with."""
        with self._cupy.cuda.Device(self._number):
            return self._cupy.cuda.runtime.ipcGetMemHandle(self.own(group))

    def open(self, handle: bytes) -> int:
        """The address, in this process, of another rank's window."""
        with self._cupy.cuda.Device(self._number):
            return self._cupy.cuda.runtime.ipcOpenMemHandle(handle)

    def close(self, opened: list[int], unused: Callable[[], bool]) -> None:
        """Closes windows of other ranks once nothing of this rank can use them."""
        _closing.append(_Closing(opened, unused))
        self.all_closed()

    def all_closed(self) -> bool:
        """Closes what is unused by now; returns whether nothing is left to close."""
        for each in [each for each in _closing if each.unused()]:
            # If the GPU has failed, what is open ends with this process. Another thread, which ends
            # a wait of this one in CUDA, may have closed it meanwhile.
            failed = suppress(RuntimeError, ValueError)
            with deferred(), failed, self._cupy.cuda.Device(self._number):
                _closing.remove(each)
                for at in each.opened:
                    self._cupy.cuda.runtime.ipcCloseMemHandle(at)
        return not _closing


def _leave(number: int, own: dict[int, int]) -> None:
    _spare[number].extend(own.values())
