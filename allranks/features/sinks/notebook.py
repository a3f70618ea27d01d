"""Passes on what the ranks report to tools of others: ``--log-to`` and ``--trace-to``.

The notebook's kernel writes it, in one thread for each tool: a cluster has one run there, with all
ranks in it.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from allranks.cluster.features import ClusterContext, NotebookFeature
from allranks.cluster.options import StartOption
from allranks.features.sinks import spans, writers
from allranks.features.sinks.records import TraceCells, TracedCalls
from allranks.features.sinks.spans import CellEnded, CellStarted
from allranks.features.sinks.writers import Writer, missing
from allranks.records.telemetry import Points
from allranks.records.wire import Record, Reply

_LOG_TO = StartOption(
    "log-to",
    "ALLRANKS_LOG_TO",
    tuple(writers.WRITERS),
    "write the values of log(…) with this library too",
)
_TRACE_TO = StartOption(
    "trace-to",
    "ALLRANKS_TRACE_TO",
    tuple(spans.WRITERS),
    "send a span for each cell, rank and collective",
)
_SINKS: dict[StartOption, Mapping[str, type[Writer]]] = {
    _LOG_TO: writers.WRITERS,
    _TRACE_TO: spans.WRITERS,
}
_BATCH_SECONDS = 0.5
#: How long the end of the ranks waits for what is not written yet.
_END_SECONDS = 30.0
#: More items that wait are dropped: a server may be slower than the ranks.
_MOST_WAITING = 1_000_000


class Sinks(NotebookFeature):
    """Has a run of each chosen tool while there are ranks."""

    start_options = tuple(_SINKS)
    in_cells = False
    #: Of ranks that another notebook traces, too.
    arriving: tuple[type[Record], ...] = (TracedCalls,)

    def __init__(self) -> None:
        self._log: Run | None = None
        self._trace: Run | None = None

    def started(self, cluster: ClusterContext) -> None:
        self.stopped()
        self._cluster = cluster
        chosen = {
            option: cluster.settings.get(option.variable) or os.environ.get(option.variable, "")
            for option in _SINKS
        }
        self._log, self._trace = (
            Run(known[chosen[option]])
            if chosen[option] in known and not missing(known[chosen[option]])
            else None
            for option, known in _SINKS.items()
        )
        self.in_cells = bool(self._log or self._trace)
        self.arriving = (
            TracedCalls,
            *([Points] if self._log else []),
            *([Reply] if self._trace else []),
        )

    def start_text(self, settings: Mapping[str, str]) -> str:
        lines = []
        runs = self._log, self._trace
        for (option, known), run in zip(_SINKS.items(), runs, strict=True):
            chosen = settings.get(option.name) or os.environ.get(option.variable, "")
            if not chosen:
                continue
            if chosen not in known:
                lines.append(
                    f"expected {', '.join(known)} in {option.variable}, found {chosen!r:.60}: "
                    "it is ignored."
                )
                continue
            kind = known[chosen]
            if absent := missing(kind):
                lines.append(
                    f"{kind.title} gets no {kind.items}: expected the package {absent}, found "
                    f"none. Type: %pip install {absent}, and then: %distributed restart"
                )
            else:
                name = run.name if run is not None else ""
                lines.append(f"{kind.title} also gets the {kind.items}: {kind.about(name)}")
        return "\n".join(lines)

    def ranks_reserved(self) -> None:
        self._trace_cells()

    def cell_started(self) -> None:
        self._trace_cells()
        if self._trace is not None and self.cell is not None:
            self._trace.add([CellStarted.now(self.cell.number, self.cell.ranks)])

    def _trace_cells(self) -> None:
        if self._trace is not None:
            # Before each cell, because ranks may have been replaced.
            self._cluster.send(range(self._cluster.size), TraceCells())

    def message_arriving(self, record: Record, payloads: list[bytes]) -> Record | None:
        if isinstance(record, Points):
            if self._log is not None:
                self._log.add(writers.values(record, payloads[0]))
        elif self._trace is not None:
            self._trace.add([record])
        return None if isinstance(record, TracedCalls) else record

    def cell_finished(self) -> None:
        if self.cell is None:
            return
        if self._trace is not None:
            self._trace.add([CellEnded(self.cell.number, time.time())])
        for run in self._runs():
            if text := run.news():
                self.cell.notice(text)

    def stopped(self) -> None:
        runs = [*self._runs()]
        self._log = self._trace = None
        self.arriving, self.in_cells = (TracedCalls,), False
        for run in runs:
            run.close()
            if text := run.news():
                print(text)

    def _runs(self) -> Iterator[Run]:
        yield from (run for run in (self._log, self._trace) if run is not None)


class Run:
    """One run of a tool, and the thread that writes it."""

    def __init__(self, kind: type[Writer]) -> None:
        self.name = f"allranks-{time.strftime('%Y%m%d-%H%M%S')}"
        self._kind = kind
        self._waiting: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._count = 0
        self._dropped = 0
        self._problem = self._told = ""
        # Not at the first item: libraries refuse to be imported in a thread at the end.
        self._thread = threading.Thread(target=self._write, name="allranks-sink", daemon=True)
        self._thread.start()
        # The kernel may end without stopping its ranks.
        atexit.register(self.close)

    def add(self, items: list[Any]) -> None:
        """Accepts items in any thread; never waits."""
        if self._count > _MOST_WAITING or self._problem:
            self._dropped += len(items)
            return
        self._count += len(items)
        self._waiting.put(items)

    def news(self) -> str:
        """Returns a line about items that were not written, once; "" for none."""
        kind, text = self._kind, ""
        if self._problem:
            text = (
                f"{kind.title} gets no more {kind.items}: expected it to accept them, found "
                f"{self._problem}. The panel has them all. "
                "To try again, type: %distributed restart"
            )
        elif self._dropped:
            text = (
                f"{kind.title} is slower than the ranks: {self._dropped:,} {kind.items} are not "
                "written"
            )
        told, self._told = self._told, text
        return "" if text == told else text

    def _write(self) -> None:
        try:
            writer = self._kind(self.name)
            try:
                while (batch := self._batch()) is not None:
                    writer.write(batch)
                    self._count -= len(batch)
            finally:
                writer.close()
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error!s:.200}"

    def _batch(self) -> list[Any] | None:
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
            self._problem = f"{self._count:,} left after {_END_SECONDS:g} s"


FEATURE = Sinks
