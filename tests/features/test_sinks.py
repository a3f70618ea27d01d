"""Values of ``log(…)`` and spans in tools of others, read back by their own readers."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest

from allranks import Cluster
from allranks.errors import CellFailed
from allranks.notebook import load_features

#: MLflow uses what SQLAlchemy calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CELL = """
for i in range(1200): log(step=i, loss=i + rank)
log({"val/x": float("nan")}, member="a=1")
log(given=2.0, step=7)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load_features()


def run_cell(library: str) -> None:
    with Cluster(n=2, settings={"ALLRANKS_LOG_TO": library}) as ranks:
        ranks.run(CELL)


def test_tensorboard_shows_each_rank_as_a_run(tmp_path, monkeypatch):
    # Its reader would import TensorFlow.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_cell("tensorboard")
    (run,) = (tmp_path / "runs").iterdir()
    assert sorted(folder.name for folder in run.iterdir()) == ["rank-0", "rank-1"]
    found = EventAccumulator(str(run / "rank-1"), {"scalars": 0}).Reload()
    assert found.Tags()["scalars"] == ["loss", "val/x/a=1", "given"]
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(i, i + 1) for i in range(1200)]
    assert [(e.step, e.value) for e in found.Scalars("given")] == [(7, 2.0)]
    assert math.isnan(found.Scalars("val/x/a=1")[0].value)


def test_mlflow_has_one_run_with_the_ranks_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "course")
    from mlflow import MlflowClient

    client = MlflowClient()
    client.search_experiments()  # makes the tables, which takes long on a busy machine
    run_cell("mlflow")
    experiment = client.get_experiment_by_name("course")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    names = {"loss", "val/x/a_1", "given"}
    assert set(run.data.metrics) == {f"{name}/rank-{rank}" for name in names for rank in range(2)}
    history = client.get_metric_history(run.info.run_id, "loss/rank-1")
    assert sorted((one.step, one.value) for one in history) == [(i, i + 1) for i in range(1200)]


def wandb_records(content: bytes) -> Iterator[Any]:
    """Yields the records of a file of wandb, which has no reader in Python. As LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, record = 7, b""
    while at < len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(record)
            record = b""


def test_wandb_has_one_run_offline_with_the_ranks_in_it(tmp_path, monkeypatch):
    # Without a key it is offline by itself.
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run_cell("wandb")
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = [
        {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for record in wandb_records(path.read_bytes())
        if record.WhichOneof("record_type") == "history"
    ]
    losses = [(int(r["step"]), float(r["loss/rank-1"])) for r in rows if "loss/rank-1" in r]
    assert losses == [(i, i + 1) for i in range(1200)]
    assert any(row.get("given/rank-0") for row in rows)


def test_a_library_that_fails_is_named_and_the_cell_is_not_affected(monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://")
    run_cell("mlflow")
    assert (
        "MLflow gets no more values of log(…): expected it to accept them"
        in capsys.readouterr().out
    )


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The spans that a receiver of OTLP on this machine has got."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    found.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield found
        server.shutdown()
        thread.join()


def details(span: Any) -> dict[str, Any]:
    return {it.key: getattr(it.value, it.value.WhichOneof("value")) for it in span.attributes}


def below(spans: list[Any], parent: Any) -> list[Any]:
    return [span for span in spans if span.parent_span_id == parent.span_id]


def test_spans_of_a_cell_have_its_ranks_and_their_calls(collector):
    from opentelemetry.sdk.trace import TracerProvider

    with Cluster(n=3, settings={"ALLRANKS_TRACE_TO": "otlp"}) as ranks:
        with TracerProvider().get_tracer("mine").start_as_current_span("experiment") as mine:
            ranks.run(
                "import time\nimport numpy as np\n"
                "from allranks.collectives import world\n"
                "from allranks.collectives.calls.rank_state import TICKET\n"
                "waits = lambda other: world.current().board.get(other, TICKET)\n"
                "while rank == 2 and not (waits(0) and waits(1)): time.sleep(0.01)\n"
                "allreduce(np.ones(1000), name='gradients')\nbarrier()"
            )
        with pytest.raises(CellFailed):
            ranks.run("if rank == 1: raise ValueError('no data')\nbarrier()")
        ranks.map(len, ["ab", "cde"])
    spans = collector
    first = next(span for span in spans if span.parent_span_id == mine.context.span_id.to_bytes(8))
    assert first.trace_id == mine.context.trace_id.to_bytes(16)
    parts = sorted(below(spans, first), key=lambda span: span.name)
    assert [part.name for part in parts] == ["rank 0", "rank 1", "rank 2"]
    for part in parts:
        reduced, met = below(spans, part)
        assert [reduced.name, met.name] == ["allreduce", "barrier"]
        assert first.start_time_unix_nano <= part.start_time_unix_nano
        assert part.start_time_unix_nano <= reduced.start_time_unix_nano
        assert reduced.end_time_unix_nano <= met.end_time_unix_nano <= part.end_time_unix_nano
        found = details(reduced)
        assert (found["allranks.bytes"], found["allranks.group_size"]) == (8000, 3)
        assert found["allranks.line"] == "gradients"
        assert found["allranks.last_rank"] == 2
    waits = [details(below(spans, part)[0])["allranks.wait_seconds"] for part in parts]
    assert min(waits[:2]) > waits[2] == 0
    (failed,) = (
        span for span in spans if "no data" in span.status.message and not span.parent_span_id
    )
    assert "rank 1: ValueError: no data" in failed.status.message
    assert {span.status.code for span in below(spans, failed)} == {2}
    members = [span for span in spans if span.name.startswith("member")]
    assert len(members) == 2


def test_a_collector_that_is_not_there_is_named_and_no_cell_waits_for_it(monkeypatch, capfd):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with Cluster(n=2, settings={"ALLRANKS_TRACE_TO": "otlp"}) as ranks:
        ranks.run("barrier()")
    output = capfd.readouterr()
    assert "OpenTelemetry gets no more spans of cells and collectives: expected" in output.out
    assert "127.0.0.1" in output.out
    assert "export" not in output.err
