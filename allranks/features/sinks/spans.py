"""Spans for OpenTelemetry: one for each cell, below it one for each rank, below it its calls."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from allranks import __version__
from allranks.features.sinks.records import TracedCall, TracedCalls
from allranks.features.sinks.writers import Writer
from allranks.records.ranks import label
from allranks.records.wire import Reply

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
#: The most spans of one request.
_MOST = 1000


class CellStarted(NamedTuple):
    """A cell is sent; ``context`` has the span in which the notebook's own code runs, if any."""

    cell: int
    ranks: tuple[int, ...]
    at: float
    context: Any

    @classmethod
    def now(cls, cell: int, ranks: tuple[int, ...]) -> Self:
        from opentelemetry import context

        return cls(cell, ranks, time.time(), context.get_current())


class CellEnded(NamedTuple):
    """All ranks have left a cell."""

    cell: int
    at: float


class OpenTelemetry:
    """Sends spans by OTLP over HTTP; OpenTelemetry's variables choose where to, and the rest."""

    title: ClassVar[str] = "OpenTelemetry"
    items: ClassVar[str] = "spans of cells and collectives"
    package: ClassVar[str] = "opentelemetry-exporter-otlp-proto-http"
    module: ClassVar[str] = "opentelemetry.exporter.otlp.proto.http"

    def __init__(self, name: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

        self._ended = ended = list[ReadableSpan]()

        class Collecting(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                ended.append(span)

        service = os.environ.get("OTEL_SERVICE_NAME", "allranks")
        resource = Resource.create({"service.name": service, "service.instance.id": name})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(Collecting())
        self._tracer = provider.get_tracer("allranks", __version__)
        self._exporter = OTLPSpanExporter()
        self._reason = _Reason()
        logging.getLogger(_LOGGER).addFilter(self._reason)
        self._cells: dict[int, Any] = {}
        self._ranks: dict[tuple[int, int], _RankSpan] = {}
        self._failures: dict[int, list[str]] = {}

    @staticmethod
    def about(name: str) -> str:
        """Returns where the spans go."""
        service = os.environ.get("OTEL_SERVICE_NAME", "allranks")
        return f"the service {service} at {_collector()}"

    def write(self, items: Iterable[Any]) -> None:
        """Makes the spans, and sends those that have ended."""
        for item in items:
            if isinstance(item, CellStarted):
                self._start_cell(item)
            elif isinstance(item, CellEnded):
                self._end_cell(item.cell, item.at)
            elif isinstance(item, TracedCalls):
                self._take_calls(item)
            elif isinstance(item, Reply):
                self._end_rank(item)
        self._send()

    def close(self) -> None:
        """Ends all spans, and sends them."""
        try:
            for cell in [*self._cells]:
                self._end_cell(cell, time.time())
            self._send()
        finally:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]
            logging.getLogger(_LOGGER).removeFilter(self._reason)

    def _start_cell(self, item: CellStarted) -> None:
        self._cells[item.cell] = self._tracer.start_span(
            f"cell {item.cell}",
            item.context,
            start_time=_ns(item.at),
            attributes={"allranks.cell": item.cell, "allranks.ranks": label(item.ranks)},
        )

    def _end_cell(self, cell: int, at: float) -> None:
        for rank in [rank for number, rank in self._ranks if number == cell]:
            self._fail(self._ranks[cell, rank].span, cell, f"rank {rank} has sent no reply")
            self._ranks.pop((cell, rank)).span.end(_ns(at))
        span = self._cells.pop(cell, None)
        if span is None:
            return
        if failures := self._failures.pop(cell, []):
            self._fail(span, cell, "; ".join(failures))
        span.end(_ns(at))

    def _take_calls(self, record: TracedCalls) -> None:
        known = self._ranks.get((record.cell, record.rank))
        if known is None:
            known = self._start_rank(record)
        for fields in record.calls:
            self._add_call(known.context, TracedCall(*fields))
        known.left_out += record.left_out
        known.ended = record.ended

    def _start_rank(self, record: TracedCalls) -> _RankSpan:
        from opentelemetry.trace import set_span_in_context

        cell = self._cells.get(record.cell)
        if cell is not None:
            cell.update_name(record.label)
        # A cell that a feature runs at the end of another one belongs to that; members of an
        # ensemble have no span above that of their rank.
        above = self._cells.get(record.cell - 1) if cell is None else cell
        span = self._tracer.start_span(
            f"rank {record.rank}" if cell is not None else f"{record.label}, rank {record.rank}",
            set_span_in_context(above) if above is not None else None,
            start_time=_ns(record.began),
            attributes={"allranks.rank": record.rank, "host.name": record.host},
        )
        known = self._ranks[record.cell, record.rank] = _RankSpan(span, set_span_in_context(span))
        return known

    def _add_call(self, parent: Any, call: TracedCall) -> None:
        span = self._tracer.start_span(
            call.op,
            parent,
            start_time=_ns(call.began),
            attributes={
                "allranks.op": call.op,
                "allranks.line": call.line,
                "allranks.bytes": call.nbytes,
                "allranks.dtype": call.dtype,
                "allranks.group_size": call.group_size,
                "allranks.transport": call.transport,
                "allranks.wait_seconds": call.wait_seconds,
                "allranks.last_rank": call.last_rank,
            },
        )
        if call.complete > call.began:
            span.add_event("all ranks have arrived", timestamp=_ns(call.complete))
        span.end(_ns(call.ended))

    def _end_rank(self, reply: Reply) -> None:
        known = self._ranks.pop((reply.cell, reply.rank), None)
        if known is None:
            return
        if reply.status != "ok":
            found = reply.report
            text = f"{found.etype}: {found.message}" if found is not None else reply.status
            self._fail(known.span, reply.cell, f"rank {reply.rank}: {text:.500}")
        if known.left_out:
            known.span.set_attribute("allranks.calls_left_out", known.left_out)
        known.span.end(_ns(known.ended or time.time()))

    def _fail(self, span: Any, cell: int, text: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, text))
        if cell in self._cells and span is not self._cells[cell]:
            self._failures.setdefault(cell, []).append(text)

    def _send(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        while self._ended:
            batch = self._ended[:_MOST]
            del self._ended[:_MOST]
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise ConnectionError(f"{self._reason.text.rstrip('.')}, at {_collector()}")


@dataclass
class _RankSpan:
    """``context`` is for the spans below it; ``ended`` is 0 while the rank runs the cell."""

    span: Any
    context: Any
    left_out: int = 0
    ended: float = 0.0


def _collector() -> str:
    found = os.environ.get(_TRACES_ENDPOINT) or os.environ.get(_ENDPOINT)
    return found or "http://localhost:4318"


def _ns(seconds: float) -> int:
    return int(1e9 * seconds)


class _Reason(logging.Filter):
    """Keeps the messages of the exporter in this thread, which would be shown below some cell."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if threading.get_ident() != self._thread:
            return True
        self.text = record.getMessage()
        return False


WRITERS: dict[str, type[Writer]] = {"otlp": OpenTelemetry}
"""Where spans can go, as it is typed."""
