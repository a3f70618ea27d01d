"""When a rank was at what: seconds of waiting, transfer and imports in bins of a cell's time."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

BINS = 256
_FIRST_WIDTH_SECONDS = 1 / 256
_MOST_ROWS = 64
"""Waits for more ranks than these are counted for nobody, whose number is -1."""

Row = list[float]


class Spans:
    """Bins from the beginning of a cell on; when they are full, two become one.

    Args:
        origin: when the cell begins, by the clock of what is added.
    """

    def __init__(self, origin: float) -> None:
        self.origin = origin
        self.width = _FIRST_WIDTH_SECONDS
        self._end = origin + BINS * self.width
        self.transfer: Row = [0.0] * BINS
        self.waits: dict[int, Row] = {}
        """By the rank that was waited for."""
        self.imports: dict[str, Row] = {}
        """By the module."""
        self.changed_at = origin
        """Nothing before this has changed since it was last set."""

    def call(self, ended: float, wait: float, transfer: float, whom: int) -> None:
        """Counts a call that has ended: it waited, and then it transferred."""
        row = self.waits.get(whom)
        if row is None:
            row = self._row(whom)
        while ended >= self._end:
            self._coarser()
        at = int((ended - self.origin) / self.width)
        met = ended - transfer
        if met - wait < self.changed_at:
            self.changed_at = met - wait
        if met - wait >= self.origin + at * self.width:
            # A short call lies within one bin.
            self.transfer[at] += transfer
            row[at] += wait
        else:
            self._spread(self.transfer, met, ended)
            self._spread(row, met - wait, met)

    def imported(self, module: str, began: float, ended: float) -> None:
        """Counts a time in which a module was being imported."""
        row = self.imports.get(module)
        if row is None:
            if len(self.imports) >= _MOST_ROWS:
                module = "(others)"
            row = self.imports.setdefault(module, [0.0] * BINS)
        self.changed_at = min(self.changed_at, began)
        while ended >= self._end:
            self._coarser()
        self._spread(row, began, ended)

    def used(self, seconds: float) -> int:
        """Returns how many bins a cell of so many seconds has filled; they hold all of it."""
        while self.origin + seconds >= self._end:
            self._coarser()
        return max(1, min(BINS, 1 + int(seconds / self.width)))

    def shares(self, bins: int, first: int = 0, each: int = 1) -> bytes:
        """Returns of so many bins how much was importing, waiting and transfer, as bytes.

        Args:
            bins: up to which one.
            first: from which one on.
            each: so many of them are told as one.
        """
        told = bytearray()
        for rows in (self.imports.values(), self.waits.values(), [self.transfer]):
            for at in range(first, bins, each):
                share = sum(sum(row[at : at + each]) for row in rows) / (each * self.width)
                told.append(max(0, min(255, round(255 * share))))
        return bytes(told)

    def whom(self, bins: int, first: int = 0, each: int = 1) -> bytes:
        """Returns of so many bins for whom the rank waited longest; -1 where it did not."""
        told = array("h")
        for at in range(first, bins, each):
            sums = {rank: sum(row[at : at + each]) for rank, row in self.waits.items()}
            rank = max(sums, key=lambda one: sums[one], default=-1)
            told.append(rank if rank >= 0 and sums[rank] > 0 else -1)
        return told.tobytes()

    @contextmanager
    def waiting(self, since: float, now: float, whom: int) -> Iterator[None]:
        """Counts, while it lasts, a wait that has not ended: what it was comes with its end."""
        self.used(now - self.origin)
        row = self._row(whom)
        before = list(row)
        self._spread(row, since, now)
        self.changed_at = min(self.changed_at, since)
        try:
            yield
        finally:
            row[:] = before

    def _row(self, whom: int) -> Row:
        if whom < 0 or whom > 32_767 or len(self.waits) >= _MOST_ROWS:
            whom = -1
        return self.waits.setdefault(whom, [0.0] * BINS)

    def _spread(self, row: Row, began: float, ended: float) -> None:
        """Adds a time to the bins that it lies in; what was before the cell is left out."""
        began = max(0.0, began - self.origin)
        ended -= self.origin
        while began < ended:
            at = int(began / self.width)
            edge = min(ended, (at + 1) * self.width)
            if edge <= began:  # as floating-point numbers round
                at, edge = at + 1, min(ended, (at + 2) * self.width)
            if at >= BINS:
                return
            row[at] += edge - began
            began = edge

    def _coarser(self) -> None:
        self.width *= 2
        self._end = self.origin + BINS * self.width
        for row in (self.transfer, *self.waits.values(), *self.imports.values()):
            row[:] = _halved(row)


def _halved(row: Sequence[float]) -> Row:
    pairs = [a + b for a, b in zip(row[::2], row[1::2], strict=True)]
    return pairs + [0.0] * (BINS - len(pairs))
