"""What a rank tells beside its output while a cell runs: curves, timings and a pulse."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import accumulate
from time import monotonic, perf_counter, process_time
from typing import Any

import psutil

from allranks import collectives
from allranks.collectives import world
from allranks.collectives.timings import BINS, Totals
from allranks.engine.cells.metrics import Metrics
from allranks.engine.features import RankHooks
from allranks.engine.imports import importing
from allranks.engine.requests import current_line
from allranks.records.telemetry import Points, Pulse, Strip, Telemetry, Timings

_POINTS_SECONDS = 0.1
_TIMINGS_SECONDS = 0.5
_PULSE_SECONDS = 1.0
#: Soon, as the report of a rank that dies names the line of its last pulse.
_FIRST_PULSE_SECONDS = 0.2
#: While somebody looks; with the timings, as a call is counted with them.
_LIVE_STRIP_SECONDS = 0.9
_IMPORT_SECONDS = 1.0
#: A cell that is over sooner needs no picture of its time.
_STRIP_SECONDS = 0.2
#: A rank says of so many others how long it waited for them.
_WAITS = 8
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
        features: add to a pulse.
    """

    def __init__(self, rank: int, metrics: Metrics, totals: Totals, features: RankHooks) -> None:
        self.rank = rank
        self._metrics = metrics
        self._totals = totals
        self._process = psutil.Process()
        self._features = features
        self.begin(0)

    def begin(self, cell: int) -> None:
        """A cell starts: what comes belongs to it."""
        self._cell = cell
        self._metrics.begin()
        self._totals.begin()
        self._dropped = 0
        self._pulse: Pulse | None = None
        self._steps: list[float] = []
        self._importing, self._import_began = "", 0.0
        self._seen_at = perf_counter()
        #: So many bins are told as one while somebody looks, whose width was told, and when.
        self._each, self._told_width, self._strip_at = 0, 0.0, 0.0
        now = monotonic()
        self._points_at, self._timings_at = now, now
        # The load is counted from here; a cell that ends at once has no pulse.
        self._busy_seconds, self._looked_at = process_time(), now
        self._pulse_at = now + _FIRST_PULSE_SECONDS

    def watch(self, bins: int) -> None:
        """Tells the strip of the cell that runs, in so many bins at most; 0 ends that.

        May be called from another thread.
        """
        self._told_width, self._strip_at = 0.0, 0.0
        self._each = -(-BINS // bins) if bins else 0

    def news(self, final: bool = False) -> Iterator[Message]:
        """Yields the records that are due.

        Args:
            final: the cell has ended: everything is due, and no pulse.
        """
        now = monotonic()
        self._see_imports()
        if final or now >= self._points_at:
            self._points_at = now + _POINTS_SECONDS
            yield from self._points()
        if final or now >= self._timings_at:
            self._timings_at = now + _TIMINGS_SECONDS
            changed = self._totals.changed()
            if changed:
                yield Timings(self.rank, self._cell, tuple(row.to_row() for row in changed)), []
            if self._each and not final and now >= self._strip_at:
                self._strip_at = now + _LIVE_STRIP_SECONDS
                yield self._live_strip()
        if final:
            yield from self._strip()
        elif now >= self._pulse_at:
            pulse = self._look()
            # Without a line the cell has not begun its first statement yet.
            self._pulse_at = now + (_PULSE_SECONDS if pulse.line else _FIRST_PULSE_SECONDS)
            if pulse != self._pulse:
                self._pulse = pulse
                yield pulse, []

    def _points(self) -> Iterator[Message]:
        series, pairs = self._metrics.take()
        if series:
            steps = [array("d", pairs[16 * n - 16 : 16 * n - 8])[0] for n in _ends(series)]
            at = perf_counter() - self._totals.spans.origin
            self._steps = [*(self._steps[:2] or [max(steps), at]), max(steps), at]
        dropped = self._metrics.dropped
        if series or dropped != self._dropped:
            self._dropped = dropped
            yield Points(self.rank, self._cell, tuple(series), dropped), [pairs]

    def _see_imports(self) -> None:
        """Takes in what is being imported, as it is now, for the time since the last look."""
        now, module = perf_counter(), importing()
        if module and module == self._importing:
            self._totals.spans.imported(module, self._seen_at, now)
        elif module:
            self._import_began = now
        self._importing, self._seen_at = module, now

    def _strip(self) -> Iterator[Message]:
        """Yields how the rank has spent the cell's time, where there is something to tell."""
        spans = self._totals.spans
        seconds = perf_counter() - spans.origin
        something = spans.waits or spans.imports or self._steps or self._told_width
        if seconds >= _STRIP_SECONDS and something:
            yield self._told_strip(seconds)

    def _live_strip(self) -> Message:
        """Returns what has changed since it was told last, with the wait that goes on."""
        spans, each = self._totals.spans, self._each
        now = perf_counter()
        seconds = now - spans.origin
        spans.used(seconds)  # from here on they are as wide as they have to be
        wait = world.current().waits
        with spans.waiting(wait[0], now, wait[1]) if wait else nullcontext():
            first = 0
            if spans.width == self._told_width:
                first = int(max(0.0, spans.changed_at - spans.origin) / spans.width) // each
            self._told_width = spans.width
            told = self._told_strip(seconds, first, each)
        spans.changed_at = min(now, wait[0]) if wait else now
        return told

    def _told_strip(self, seconds: float, first: int = 0, each: int = 1) -> Message:
        """Returns the rank's time from a bin on, so many bins told as one."""
        spans = self._totals.spans
        bins = spans.used(seconds)
        waits = [[rank, sum(row)] for rank, row in spans.waits.items() if any(row)]
        imports = [[name, sum(row)] for name, row in spans.imports.items()]
        strip = Strip(
            rank=self.rank,
            cell=self._cell,
            seconds=seconds,
            width_seconds=spans.width * each,
            importing=_longest(imports),
            waits=_longest(waits),
            transfer_seconds=sum(spans.transfer),
            steps=tuple(self._steps),
            first=first,
        )
        return strip, [
            spans.shares(bins, first * each, each),
            spans.waited_for(bins, first * each, each),
        ]

    def _rss_nbytes(self) -> int:
        try:
            return int(self._process.memory_info().rss)
        except OSError:
            return 0  # a cell has left no descriptor to look with

    def _cpu_percent(self) -> float:
        """Returns the load of this process since the last time, in percent of a core."""
        busy, at = self._busy_seconds, self._looked_at
        self._busy_seconds, self._looked_at = process_time(), monotonic()
        return 100 * (self._busy_seconds - busy) / (self._looked_at - at)

    def _look(self) -> Pulse:
        rss, cpu = self._rss_nbytes(), self._cpu_percent()
        return Pulse(
            rank=self.rank,
            cell=self._cell,
            activity=collectives.activity(),
            line=current_line(),
            rss_nbytes=rss // _RSS_STEP_NBYTES * _RSS_STEP_NBYTES,
            cpu_percent=round(cpu / _CPU_STEP_PERCENT) * _CPU_STEP_PERCENT,
            importing=self._importing if self._imports_long() else "",
            **self._features.pulse_fields(),
        )

    def _imports_long(self) -> bool:
        return perf_counter() - self._import_began >= _IMPORT_SECONDS


def _ends(series: list[list[Any]]) -> Iterator[int]:
    """Yields where the pairs of each series end, among those of all."""
    return accumulate(count for *_, count in series)


def _longest(pairs: list[list[Any]]) -> tuple[list[Any], ...]:
    return tuple(sorted(pairs, key=lambda pair: -float(pair[1]))[:_WAITS])
