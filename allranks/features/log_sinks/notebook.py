"""Passes the values of ``log(…)`` on to a tracking library: the option ``--log-to``.

The notebook's kernel writes them, in one thread: a cluster has one run, and the ranks are in it.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from array import array
from collections.abc import Mapping

from allranks.cluster.features import ClusterContext, NotebookFeature
from allranks.cluster.options import StartOption
from allranks.features.log_sinks.writers import WRITERS, Value, missing
from allranks.records.telemetry import Points
from allranks.records.wire import Record

_OPTION = StartOption(
    "log-to", "ALLRANKS_LOG_TO", tuple(WRITERS), "write the values of log(…) with this library too"
)
_BATCH_SECONDS = 0.5
#: How long the end of the ranks waits for what is not written yet.
_END_SECONDS = 30.0
#: More values that wait are dropped: a server may be slower than the ranks.
_MOST_WAITING = 1_000_000


class LogSink(NotebookFeature):
    """Has one run while there are ranks, if a library was chosen."""

    start_options = (_OPTION,)
    in_cells = False
    arriving: tuple[type[Record], ...] = ()

    def __init__(self) -> None:
        self._run: Run | None = None

    def started(self, cluster: ClusterContext) -> None:
        self.stopped()
        chosen = cluster.settings.get(_OPTION.variable) or os.environ.get(_OPTION.variable, "")
        if chosen in WRITERS and not missing(chosen):
            self._run = Run(chosen)
            self.arriving, self.in_cells = (Points,), True

    def start_text(self, settings: Mapping[str, str]) -> str:
        chosen = settings.get(_OPTION.name) or os.environ.get(_OPTION.variable, "")
        if not chosen:
            return ""
        if chosen not in WRITERS:
            return (
                f"expected {', '.join(WRITERS)} in {_OPTION.variable}, found {chosen!r:.60}: "
                "values of log(…) are shown in the panel only."
            )
        title = WRITERS[chosen].title
        if absent := missing(chosen):
            return (
                f"log(…) is not written to {title}: expected the package {absent}, found none. "
                f"Type: %pip install {absent}, and then: %distributed restart"
            )
        return f"log(…) also writes to {title}: {WRITERS[chosen].about(self._run_name())}"

    def _run_name(self) -> str:
        return self._run.name if self._run is not None else ""

    def message_arriving(self, record: Record, payloads: list[bytes]) -> Record | None:
        if self._run is not None and isinstance(record, Points):
            self._run.add(record, payloads[0])
        return record

    def cell_finished(self) -> None:
        if self._run is not None and self.cell is not None and (text := self._run.news()):
            self.cell.notice(text)

    def stopped(self) -> None:
        run, self._run = self._run, None
        self.arriving, self.in_cells = (), False
        if run is not None:
            run.close()
            if text := run.news():
                print(text)


class Run:
    """One run of a library, and the thread that writes it."""

    def __init__(self, library: str) -> None:
        self.name = f"allranks-{time.strftime('%Y%m%d-%H%M%S')}"
        self._library = library
        self._waiting: queue.SimpleQueue[list[Value] | None] = queue.SimpleQueue()
        self._count = 0
        self._dropped = 0
        self._problem = self._told = ""
        # Not at the first value: libraries refuse to be imported in a thread at the end.
        self._thread = threading.Thread(target=self._write, name="allranks-log", daemon=True)
        self._thread.start()
        # The kernel may end without stopping its ranks.
        atexit.register(self.close)

    def add(self, points: Points, pairs: bytes) -> None:
        """Accepts values from the thread that receives; never waits."""
        numbers, values, start = array("d", pairs), [], 0
        at = time.time()
        for name, member, count in points.series:
            shown = f"{name}/{member}" if member else name
            part = numbers[start : start + 2 * count]
            start += 2 * count
            for step, value in zip(part[::2], part[1::2], strict=True):
                values.append(Value(points.rank, shown, int(step), value, at))
        if self._count > _MOST_WAITING or self._problem:
            self._dropped += len(values)
            return
        self._count += len(values)
        self._waiting.put(values)

    def news(self) -> str:
        """Returns a line about values that were not written, once; "" for none."""
        title = WRITERS[self._library].title
        text = ""
        if self._problem:
            text = (
                f"log(…) no longer writes to {title}: expected it to accept values, found "
                f"{self._problem}. The panel has them all. To try again, type: %distributed restart"
            )
        elif self._dropped:
            text = f"{title} is slower than the ranks: {self._dropped:,} values are not written"
        told, self._told = self._told, text
        return "" if text == told else text

    def _write(self) -> None:
        try:
            writer = WRITERS[self._library](self.name)
            try:
                while (batch := self._batch()) is not None:
                    writer.write(batch)
                    self._count -= len(batch)
            finally:
                writer.close()
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error!s:.200}"

    def _batch(self) -> list[Value] | None:
        found = self._waiting.get()
        if found is None:
            return None
        # Few large writes, because each may go over a network.
        late = time.monotonic() + _BATCH_SECONDS
        while (left := late - time.monotonic()) > 0:
            try:
                more = self._waiting.get(timeout=left)
            except queue.Empty:
                break
            if more is None:
                self._waiting.put(None)
                break
            found += more
        return found

    def close(self) -> None:
        """Writes what is left, and ends the run."""
        atexit.unregister(self.close)
        self._waiting.put(None)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            # The thread goes on, and may still succeed before the kernel ends.
            self._problem = f"{self._count:,} values left after {_END_SECONDS:g} s"


FEATURE = LogSink
