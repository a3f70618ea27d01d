"""Reports of a rank beside its output while a cell runs: curves, timings and a pulse."""

from __future__ import annotations

import os
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import astuple
from itertools import accumulate
from math import isfinite
from time import monotonic, perf_counter, process_time
from typing import Any

import psutil

from allranks.collectives import world
from allranks.collectives.calls import frames, sites
from allranks.collectives.calls.journal import Journal
from allranks.collectives.calls.sites import USER, kind_of
from allranks.collectives.timings import BINS, Totals
from allranks.errors import UsageError
from allranks.records.code_names import is_cell
from allranks.records.telemetry import Points, Pulse, Strip, Telemetry, Timings

_POINTS_SECONDS = 0.1
_TIMINGS_SECONDS = 0.5
_PULSE_SECONDS = 1.0
#: Short, because the report of a rank that dies names the line of its last pulse.
_FIRST_PULSE_SECONDS = 0.2
#: While a reader has the section open. Slightly less than two timings, to be sent with them.
_LIVE_STRIP_SECONDS = 0.9
_IMPORT_SECONDS = 1.0
#: A shorter cell gets no picture of its time.
_STRIP_SECONDS = 0.2
#: A strip names this many ranks with the time that this one waited for them.
_WAITS = 8
#: Smaller changes of memory and load are not sent.
_RSS_STEP_NBYTES = 1 << 20
_CPU_STEP_PERCENT = 5
_DEEPEST = 400

Message = tuple[Telemetry, list[bytes]]


class TelemetrySender:
    """Makes this rank's telemetry: each kind at its own intervals, and only news."""

    def __init__(
        self,
        rank: int,
        metrics: Metrics,
        journal: Journal,
        pulse_fields: Callable[[], dict[str, Any]],
    ) -> None:
        self.rank = rank
        self._metrics = metrics
        self._journal = journal
        self._process = psutil.Process()
        self._pulse_fields = pulse_fields
        self.begin(0)

    def begin(self, cell: int) -> None:
        self._cell = cell
        self._metrics.begin()
        if self._journal.fresh:  # calls between two cells
            self._journal.take()
        self._began = perf_counter()
        #: From the first call or import on.
        self._totals: Totals | None = None
        self._dropped = 0
        self._pulse: Pulse | None = None
        self._steps: list[float] = []
        self._importing, self._import_began = "", 0.0
        self._seen_at = self._began
        #: For live strips: how many bins are merged into one, the width that was sent, the time.
        self._each, self._sent_width, self._strip_at = 0, 0.0, 0.0
        now = monotonic()
        self._points_at, self._timings_at = now, now
        # The load is counted from here; a cell that ends at once has no pulse.
        self._busy_seconds, self._looked_at = process_time(), now
        self._pulse_at = self._early_pulse_at = now + _FIRST_PULSE_SECONDS

    def _counted(self) -> Totals:
        if self._totals is None:
            self._totals = Totals(self._journal, self._began)
        return self._totals

    def watch(self, bins: int) -> None:
        self._sent_width, self._strip_at = 0.0, 0.0
        self._each = -(-BINS // bins) if bins else 0

    def news(self, final: bool = False) -> list[Message]:
        """Returns the records that are due; at the end of a cell all but a pulse."""
        now = monotonic()
        found: list[Message] = []
        if not final:  # else the main thread is here: it imports nothing
            self._see_imports()
        if final or now >= self._points_at:
            self._points_at = now + _POINTS_SECONDS
            self._add_points(found)
        if final or now >= self._timings_at:
            self._timings_at = now + _TIMINGS_SECONDS
            if self._journal.fresh and (changed := self._counted().changed()):
                rows = tuple(list(astuple(row)) for row in changed)
                found.append((Timings(self.rank, self._cell, rows), []))
            if self._each and not final and now >= self._strip_at:
                self._strip_at = now + _LIVE_STRIP_SECONDS
                found.append(self._live_strip())
        if final:
            # How the rank has spent the time of the cell, unless it was short or uneventful.
            seconds = perf_counter() - self._began
            spans = self._totals.spans if self._totals is not None else None
            shared = spans is not None and (spans.waits or spans.imports)
            something = shared or self._steps or self._sent_width
            if seconds >= _STRIP_SECONDS and something:
                found.append(self._make_strip(seconds))
        elif now >= self._pulse_at or (now >= self._early_pulse_at and self._shows_old_wait()):
            pulse = self._look()
            # Without a line the cell has not begun its first statement yet.
            self._early_pulse_at = now + _FIRST_PULSE_SECONDS
            self._pulse_at = now + (_PULSE_SECONDS if pulse.line else _FIRST_PULSE_SECONDS)
            if pulse != self._pulse:
                self._pulse = pulse
                found.append((pulse, []))
        return found

    def _shows_old_wait(self) -> bool:
        """Whether the last pulse names ranks for which this one no longer waits."""
        shown = self._pulse.doing.waits_for if self._pulse is not None else ""
        return bool(shown) and shown != world.current().doing.waits_for

    def _add_points(self, found: list[Message]) -> None:
        series, pairs = self._metrics.take()
        if series:
            # A pair has two doubles. This is the last step of each series.
            ends = accumulate(count for *_, count in series)
            steps = [array("d", pairs[16 * n - 16 : 16 * n - 8])[0] for n in ends]
            at = perf_counter() - self._began
            # The first and the latest step, each with its time.
            self._steps = [*(self._steps[:2] or [max(steps), at]), max(steps), at]
        dropped = self._metrics.dropped
        if series or dropped != self._dropped:
            self._dropped = dropped
            found.append((Points(self.rank, self._cell, tuple(series), dropped), [pairs]))

    def _see_imports(self) -> None:
        now, module = perf_counter(), importing()
        if module and module == self._importing:
            # Only if the last look found the same module: else it began in between.
            self._counted().spans.imported(module, self._seen_at, now)
        elif module:
            self._import_began = now
        self._importing, self._seen_at = module, now

    def _live_strip(self) -> Message:
        """Returns the bins that have changed since the last strip, with the current wait."""
        spans, each = self._counted().spans, self._each
        now = perf_counter()
        seconds = now - spans.origin
        spans.used(seconds)  # widens the bins if there are too many
        wait = world.current().waits
        with spans.waiting(wait[0], now, wait[1]) if wait else nullcontext():
            first = 0
            if spans.width == self._sent_width:
                first = int(max(0.0, spans.changed_at - spans.origin) / spans.width) // each
            self._sent_width = spans.width
            strip = self._make_strip(seconds, first, each)
        spans.changed_at = min(now, wait[0]) if wait else now
        return strip

    def _make_strip(self, seconds: float, first: int = 0, each: int = 1) -> Message:
        """Returns the rank's time from a bin on, with ``each`` bins merged into one."""
        spans = self._counted().spans
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

    def rss_nbytes(self) -> int:
        try:
            return int(self._process.memory_info().rss)
        except OSError:
            return 0  # the cell has used up all descriptors

    def _look(self) -> Pulse:
        # The load since the last pulse, in percent of a core.
        busy, at = self._busy_seconds, self._looked_at
        self._busy_seconds, self._looked_at = process_time(), monotonic()
        cpu = 100 * (self._busy_seconds - busy) / (self._looked_at - at)
        shown = (self._pulse.rss_nbytes, self._pulse.cpu_percent) if self._pulse else (0, 0)
        imports_long = perf_counter() - self._import_began >= _IMPORT_SECONDS
        return Pulse(
            rank=self.rank,
            cell=self._cell,
            doing=world.current().doing,
            line=current_line(),
            rss_nbytes=_stepped(self.rss_nbytes(), shown[0], _RSS_STEP_NBYTES),
            cpu_percent=_stepped(cpu, shown[1], _CPU_STEP_PERCENT),
            importing=self._importing if imports_long else "",
            **self._pulse_fields(),
        )


def _stepped(value: float, shown: int, step: int) -> int:
    # A value that is about halfway between two steps would be sent again and again.
    return shown if abs(value - shown) < step else round(value / step) * step


def _longest(pairs: list[list[Any]]) -> tuple[list[Any], ...]:
    return tuple(sorted(pairs, key=lambda pair: -float(pair[1]))[:_WAITS])


#: Further values are dropped until these are sent. It is enough for 100,000 values per second.
_WAITING = 50_000


class Metrics:
    """Collects the numbers of ``log(step=…, loss=…)`` until they are sent. Thread-safe."""

    def __init__(self) -> None:
        self._points: deque[tuple[str, str, float, float]] = deque()
        self._next: dict[tuple[str, str], float] = {}
        self.dropped = 0

    def log(
        self,
        values: Mapping[str, Any] | None = None,
        /,
        *more: Any,
        step: float | None = None,
        member: object = "",
        **named: Any,
    ) -> None:
        """Sends the named numbers to the notebook, which draws one curve per name.

        Example:
            ``log(step=i, loss=loss, accuracy=right / count)``

        Args:
            values: numbers whose names are not valid in Python, for example ``{"val/loss": 0.3}``.
            more: is refused: numbers need names.
            step: the place on the horizontal axis; by default 0, 1, 2, … for each name.
            member: the number of the model, if this rank trains several; each has its own curve.
            named: numbers, or arrays of one element.

        Raises:
            UsageError: a value has no name, or it or the step is not a number.
        """
        if more or not isinstance(values, Mapping | None):
            raise _without_names(values, *more)
        if values is not None:
            named = {**values, **named}
        points, who = self._points, str(member)
        given = None if step is None else _number("step", step)
        if given is not None and not isfinite(given):
            raise UsageError(
                f"log expected a finite step, found {given}. "
                "Type for example: log(step=3, loss=0.5)"
            )
        if len(points) >= _WAITING:
            self.dropped += len(named)
            return
        for name, value in named.items():
            number = value if type(value) is float else _number(name, value)
            at = self._next.get((name, who), 0.0) if given is None else given
            self._next[name, who] = at + 1.0
            points.append((name, who, at, number))

    def begin(self) -> None:
        self._points.clear()
        self._next.clear()
        self.dropped = 0

    def take(self) -> tuple[list[list[Any]], bytes]:
        series: dict[tuple[str, str], array[float]] = {}
        # May run beside `log`, in another thread: values that it adds meanwhile stay.
        for _ in range(len(self._points)):
            name, who, at, number = self._points.popleft()
            pairs = series.get((name, who))
            if pairs is None:
                pairs = series[name, who] = array("d")
            pairs.append(at)
            pairs.append(number)
        counts = [[name, who, len(pairs) // 2] for (name, who), pairs in series.items()]
        return counts, b"".join(pairs.tobytes() for pairs in series.values())


def _without_names(*values: Any) -> UsageError:
    found = ", ".join(f"{value!r:.60}" for value in values)
    name, *more = values
    example = "log(loss=0.5), or log({'val/loss': 0.5})"
    if isinstance(name, str) and len(more) == 1:  # as other libraries have it
        value = more[0] if isinstance(more[0], int | float) else "value"
        example = f"log({name}={value})" if name.isidentifier() else f"log({{{name!r}: {value}}})"
    return UsageError(f"log expected named numbers, found {found}. Type for example: {example}")


def _number(name: str, value: Any) -> float:
    item = getattr(value, "item", None)
    try:
        # An array's own float() takes one dimension less than item() does.
        return float(value if item is None else item())
    except (TypeError, ValueError, OverflowError):
        shape = getattr(value, "shape", None)
        found = f"{type(value).__name__} of shape {tuple(shape)}" if shape else f"{value!r:.60}"
        raise UsageError(
            f"log({name}=…) expected one number, found {found}. "
            f"Type for example: log({name}=float(value))"
        ) from None


#: Those of this process: cells and callbacks of Keras log to it.
process_metrics = Metrics()
log = process_metrics.log


@frames.no_collection()
def current_line() -> str:
    """Returns ``file:line  source`` of the innermost user frame of the main thread.

    It is empty before a cell's first statement and after its last one, where all frames are
    libraries'.
    """
    frame = frames.frame_of_main_thread()
    try:
        stack = traceback.extract_stack(frame) if frame else []
    except UnicodeError:  # compile() accepts a file name that is not valid text
        return ""
    own = [entry for entry in stack if is_cell(entry.filename)]
    outside = [entry for entry in stack if kind_of(entry.filename) == USER]
    for entry in (own or outside)[-1:]:
        name = os.path.basename(sites.shown_name(entry.filename))
        return f"{name}:{entry.lineno}  {entry.line or ''}".rstrip()
    return ""


@frames.no_collection()
def importing() -> str:
    """Returns the package that the main thread imports; of nested imports the outermost."""
    frame = frames.frame_of_main_thread()
    found = module = ""
    for _ in range(_DEEPEST):
        if frame is None:
            break
        code = frame.f_code
        if code.co_name == "<module>":
            module = str(frame.f_globals.get("__name__", ""))
        elif code.co_filename.startswith("<frozen importlib") and module:
            # Frames go outwards: the last module was run by this import.
            found = module
        frame = frame.f_back
    return found.partition(".")[0]
