"""How a rank has spent the time of a cell. Both sides; standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Strip:
    """A rank's time from the beginning of a cell to its end there, told at that end.

    While somebody looks at it, also about once a second: only what has changed, from the bin
    ``first`` on; a wait that goes on is counted up to now.

    ``width_seconds`` is that of a bin. Payload frame 0 holds, bin after bin, what share of it the
    rank was importing, waiting and transferring, each as a byte of which 255 is all; frame 1 for
    whom it waited longest in each bin, as native 16-bit integers, -1 where it did not.
    ``importing`` holds ``[module, seconds]``, ``waits`` ``[rank, seconds]``, the longest first.
    ``steps`` holds the first step that was logged and when, and the last one and when; or nothing.
    """

    rank: int
    cell: int
    seconds: float
    width_seconds: float
    importing: tuple[list[Any], ...]
    waits: tuple[list[Any], ...]
    transfer_seconds: float
    steps: tuple[float, ...]
    first: int = 0
