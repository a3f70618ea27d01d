"""What a rank tells beside its output while a cell runs: curves, timings and a pulse."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

import psutil

from allranks import collectives
from allranks.collectives.timings.totals import Totals
from allranks.engine.gpu import Gpu
from allranks.engine.metrics import Metrics
from allranks.engine.requests import current_line
from allranks.records.telemetry import Points, Pulse, Telemetry, Timings

_POINTS_SECONDS = 0.1
_TIMINGS_SECONDS = 0.5
_PULSE_SECONDS = 1.0
#: Memory and load that change by less are no news.
_RSS_STEP_NBYTES = 1 << 20
_CPU_STEP_PERCENT = 5

Message = tuple[Telemetry, list[bytes]]


class Teller:
    """Makes this rank's telemetry, each kind in its own time, and nothing where nothing is new.

    Args:
        rank: this process's rank.
        metrics: what cells log to.
        totals: what counts the collectives.
        device: what the rank computes on.
    """

    def __init__(self, rank: int, metrics: Metrics, totals: Totals, device: str) -> None:
        self.rank = rank
        self._metrics = metrics
        self._totals = totals
        self._process = psutil.Process()
        self._gpu = Gpu(device)
        self.begin(0)

    def begin(self, cell: int) -> None:
        """A cell starts: what comes belongs to it."""
        self._cell = cell
        self._metrics.begin()
        self._totals.begin()
        self._dropped = 0
        self._pulse: Pulse | None = None
        now = monotonic()
        self._points_at, self._timings_at = now, now
        # The load is counted from here; a cell that ends at once has no pulse.
        self._load()
        self._pulse_at = now + _PULSE_SECONDS / 2

    def news(self, final: bool = False) -> Iterator[Message]:
        """Yields the records that are due.

        Args:
            final: the cell has ended: everything is due, and no pulse.
        """
        now = monotonic()
        if final or now >= self._points_at:
            self._points_at = now + _POINTS_SECONDS
            yield from self._points()
        if final or now >= self._timings_at:
            self._timings_at = now + _TIMINGS_SECONDS
            changed = self._totals.changed()
            if changed:
                yield Timings(self.rank, self._cell, tuple(row.to_row() for row in changed)), []
        if not final and now >= self._pulse_at:
            self._pulse_at = now + _PULSE_SECONDS
            pulse = self._look()
            if pulse != self._pulse:
                self._pulse = pulse
                yield pulse, []

    def _points(self) -> Iterator[Message]:
        series, pairs = self._metrics.take()
        dropped = self._metrics.dropped
        if series or dropped != self._dropped:
            self._dropped = dropped
            yield Points(self.rank, self._cell, tuple(series), dropped), [pairs]

    def _load(self) -> tuple[int, float]:
        """Returns this process's memory and its load since the last time."""
        try:
            return self._process.memory_info().rss, self._process.cpu_percent()
        except OSError:
            return 0, 0.0  # a cell has left no descriptor to look with

    def _look(self) -> Pulse:
        rss, cpu = self._load()
        use = self._gpu.use()
        return Pulse(
            rank=self.rank,
            cell=self._cell,
            activity=collectives.activity(),
            line=current_line(),
            rss_nbytes=rss // _RSS_STEP_NBYTES * _RSS_STEP_NBYTES,
            cpu_percent=round(cpu / _CPU_STEP_PERCENT) * _CPU_STEP_PERCENT,
            gpu_nbytes=use.used_nbytes // _RSS_STEP_NBYTES * _RSS_STEP_NBYTES,
            gpu_total_nbytes=use.total_nbytes,
            gpu_percent=max(-1, use.percent // _CPU_STEP_PERCENT * _CPU_STEP_PERCENT),
            gpu_celsius=use.celsius,
        )
