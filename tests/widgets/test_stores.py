"""What a dashboard keeps: curves, timings over ranks, memory, imports, and logs piece by piece."""

from __future__ import annotations

import json
import math
import socket
import sys
from array import array
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from allranks.engine.telemetry import importing
from allranks.records.ranks import RUNNING, WAITS, Activity, ActivityState
from allranks.records.telemetry import CallTotals, Points, Pulse, Timings
from allranks.records.wire import Hello, Output
from allranks.widgets.dashboard.cell_model import CellModel, Imports, Logs, Memory, Tiles
from allranks.widgets.dashboard.curves import Curves, Key
from allranks.widgets.dashboard.saved_panel import bundle
from allranks.widgets.dashboard.tables import timings_page
from allranks.widgets.dashboard.timings import TimingTable
from allranks.widgets.dashboard.view import cell_view


def hello(rank: int, log: str = "", host: str = "") -> Hello:
    return Hello(rank, 4, rank, 4, host or socket.gethostname(), 100 + rank, "cpu", "e", "MPI", log)


def points(rank: int, name: str, pairs: list[tuple[float, float]]) -> tuple[Points, bytes]:
    flat = array("d", [number for pair in pairs for number in pair])
    return Points(rank, 1, ([name, "", len(pairs)],), 0), flat.tobytes()


def log(made: CellModel, rank: int, name: str, pairs: list[tuple[float, float]]) -> None:
    record, payload = points(rank, name, pairs)
    made.take(record, [payload])


def told(heads: list[dict[str, object]], payload: bytes) -> dict[int, tuple[bool, list[float]]]:
    """The values of each series as a page reads them, the last one behind the others."""
    flat, at, found = array("d", payload), 0, {}
    for head in heads:
        part = flat[at : at + 2 * head["count"] + 2]
        found[head["number"]] = (head["anew"], list(part[1::2]))
        at += len(part)
    assert at == len(flat)
    return found


def test_news_hold_each_point_once_and_the_last_value_also_where_it_is_not_finite():
    curves = Curves()
    curves.take(*points(0, "loss", [(0, 5), (1, 4)]))
    assert told(*curves.news()) == {0: (False, [5, 4, 4])}
    curves.take(*points(0, "loss", [(2, math.inf)]))
    assert told(*curves.news()) == {0: (False, [math.inf, math.inf])}
    assert told(*curves.news()) == {}
    assert told(*curves.everything()) == {0: (True, [5, 4, math.inf, math.inf])}
    curves.take(*points(0, "loss", [(3, math.nan)]))
    assert math.isnan(told(*curves.news())[0][1][-1])


def test_a_long_curve_is_thinned_and_keeps_its_last_value():
    curves = Curves()
    for start in range(0, 100_000, 1000):
        curves.take(*points(0, "loss", [(i, float(i)) for i in range(start, start + 1000)]))
    series = curves.series[Key("loss", 0, "")]
    assert len(series.steps) <= 2000
    assert list(series.steps) == [float(i) for i in range(0, 100_000, series.stride)]
    assert series.last == (99_999, 99_999)
    ((anew, values),) = told(*curves.news()).values()
    assert anew
    assert values[-1] == 99_999


def test_all_curves_together_are_bounded():
    curves = Curves()
    _, values = points(0, "", [(i, 1.0) for i in range(5000)])
    for rank in range(64):
        for name in "abcdefghij":
            curves.take(Points(rank, 1, ([name, "", 5000],), 0), values)
    assert len(curves.everything()[1]) < 5_000_000
    assert len(curves.series) == 640


def totals(calls: int, wait: float, transfer: float, last: dict[int, tuple[int, float]]):
    spans = tuple((rank, *pair) for rank, pair in last.items())
    seconds = wait, transfer, transfer, transfer / calls
    return list(
        astuple(CallTotals("allreduce", "g", "float32", 1000, 2, "shared", calls, *seconds, spans))
    )


def test_calls_of_one_kind_are_one_row_and_the_rank_that_others_waited_for_is_named():
    table = TimingTable()
    table.take(Timings(0, 1, (totals(10, 3.0, 1e-5, {1: (9, 3.0), 0: (1, 0.0)}),)))
    table.take(Timings(1, 1, (totals(10, 0.1, 1e-5, {1: (9, 0.0), 0: (1, 0.1)}),)))
    straggler = table.straggler()
    assert (straggler.rank, straggler.times, straggler.calls) == (1, 9, 10)
    assert straggler.seconds == pytest.approx(3.0)
    (row,) = table.by_call()
    assert row.calls == 10
    assert row.wait_seconds == pytest.approx(1.55)
    # algbw = 10 × 1000 B / 10 µs = 1 GB/s; 2 (n − 1) / n is 1 for two ranks.
    assert row.busbw_gbps == pytest.approx(1.0)
    # Later totals replace earlier ones.
    table.take(Timings(0, 1, (totals(20, 5.0, 2e-5, {1: (19, 5.0)}),)))
    assert (table.by_rank()[0].calls, table.by_rank()[0].wait_seconds) == (20, 5.0)


def test_no_rank_is_named_where_each_has_about_its_turn():
    table = TimingTable()
    for rank in range(4):
        others = {last: (25, 0.1 + 0.02 * last) for last in range(4) if last != rank}
        table.take(Timings(rank, 1, (totals(100, 0.4, 1e-5, others),)))
    assert table.straggler() is None
    table.take(Timings(0, 1, (totals(100, 2.0, 1e-5, {3: (60, 1.0), 1: (40, 0.1)}),)))
    assert table.straggler().rank == 3


def test_the_bandwidth_over_the_cell_is_that_between_two_records_of_one_rank():
    table = TimingTable()
    for calls, transfer in ((10, 1e-5), (10, 1e-5), (20, 3e-5), (30, 7e-5)):
        table.take(Timings(1, 1, (totals(calls, 0.0, transfer, {}),)))
        table.take(Timings(0, 1, (totals(calls, 0.0, 9.0, {}),)))
    (row,) = timings_page(table)["calls"]
    # 10 × 1000 B in 10 µs are 1 GB/s.
    assert row["recent"] == [1.0, 0.5, 0.25]
    assert json.loads(json.dumps(row)) == row
    for calls in range(31, 200):
        table.take(Timings(1, 1, (totals(calls, 0.0, 7e-5 + 1e-6 * (calls - 30), {}),)))
    recent = timings_page(table)["calls"][0]["recent"]
    assert len(recent) <= 32
    assert recent[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("calls", [1, 10])
def test_the_best_bandwidth_of_calls_is_not_below_the_mean_one(calls):
    table = TimingTable()
    table.take(Timings(0, 1, (totals(calls, 0.0, 1e-5, {}),)))
    table.take(Timings(1, 1, (totals(calls, 0.0, 4e-5, {}),)))
    (row,) = table.by_call()
    assert row.busbw_gbps == row.best_gbps == pytest.approx(calls * 1000 / 4e-5 / 1e9)


def test_a_tile_keeps_how_its_rank_left():
    tiles = Tiles([hello(0), hello(1)])
    assert len(tiles.news()) == 2
    waits = Activity(WAITS, "allreduce(Sum)", "rank 1")
    tiles.take(Pulse(0, 1, waits, "In[1]:2", 1 << 20, 5))
    (told,) = tiles.news()
    assert (told["state"], told["doing"]) == ("waiting", "waits for rank 1 in allreduce(Sum)")
    tiles.left(0, "error")
    tiles.take(Pulse(0, 1, RUNNING, "In[1]:3", 1 << 20, 5, 0))
    assert [(tile["rank"], tile["state"]) for tile in tiles.news()] == [(0, "failed")]
    assert tiles.said() == "1 running, rank 0 failed"


def test_a_rank_that_waited_is_not_failed_and_a_replaced_one_is_not_lost() -> None:
    tiles = Tiles([hello(0), hello(1)])
    tiles.left(1, "lost")
    tiles.left(0, "waiting")
    tiles.left(1, "replaced")
    assert tiles.said() == "1 waited, rank 1 replaced"


def test_a_heading_counts_the_ranks_and_says_for_whom_they_wait():
    tiles = Tiles([hello(rank) for rank in range(4)])
    assert tiles.said() == "running"
    for rank in (3, 2):
        said = f"{4 - rank} {'waits' if rank == 3 else 'wait'} for rank 1"
        waits = Activity(WAITS, "barrier()", "rank 1")
        tiles.take(Pulse(rank, 1, waits, "In[1]:2", 1 << 20, 5))
        assert tiles.said() == f"{rank} running, {said}"
    tiles.take(Pulse(3, 1, Activity(ActivityState("asleep")), "In[1]:2", 1 << 20, 5, 0))
    assert tiles.said() == "2 running, 1 waits for rank 1, 1 asleep"
    for rank in range(4):
        tiles.left(rank, "ok")
    assert tiles.said() == "finished"


def output(rank: int, known: int, *spans: list[int]) -> Output:
    return Output(rank, 1, (), 0, 0, known, spans)


def test_a_log_is_read_as_far_as_it_is_known_to_be_complete(tmp_path: Path):
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"earlier\n")
    logs = Logs([hello(0, str(path))])
    path.write_bytes(b"earlier\nout\nerr\nmore\n")
    assert logs.read() == []
    logs.take(output(0, 16, [12, 16]))
    (piece,) = logs.read()
    assert (piece.text, piece.err_spans, piece.skipped) == (b"out\nerr\n", [[4, 8]], 0)
    logs.take(output(0, 21))
    assert logs.read()[0].text == b"more\n"
    logs.rewind()
    assert logs.read()[0].text == b"out\nerr\nmore\n"


def test_a_log_that_runs_ahead_is_skipped_and_the_bytes_are_counted(tmp_path: Path):
    path = tmp_path / "rank-0.log"
    path.touch()
    logs = Logs([hello(0, str(path))])
    size = 40 << 20
    with path.open("wb") as file:
        file.truncate(size)
    logs.take(output(0, size))
    (piece,) = logs.read()
    assert piece.skipped == 8 << 20
    assert len(piece.text) == 512 << 10


def test_ranks_of_another_host_show_what_they_send(tmp_path: Path):
    logs = Logs([hello(0, "/nowhere/rank-0.log", host="elsewhere")])
    logs.take(Output(0, 1, (["out", "a\n"], ["err", "b\n"]), 0, 0, 4))
    (piece,) = logs.read()
    assert (piece.text, piece.err_spans) == (b"a\nb\n", [[2, 4]])
    assert logs.read() == []


MB = 1_000_000


def pulse(rank: int, rss_mb: int, gpu_mb: int = 0) -> Pulse:
    return Pulse(rank, 1, RUNNING, "In[1]:1", rss_mb * MB, 50, gpu_mb * MB)


def seen(*sizes: int, gpu: int = 0) -> Memory:
    memory = Memory()
    for second, size in enumerate(sizes):
        memory.take(pulse(0, size, gpu), second)
        memory.take(pulse(1, 300, gpu), second)
    return memory


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [((300, 399), False), ((300, 400), True), ((3000, 3200), False), ((300, 900, 300), True)],
)
def test_memory_is_shown_where_a_rank_has_clearly_more_or_less_of_it(sizes, shown):
    assert bool(seen(*sizes).shown) is shown


def test_memory_of_both_kinds_is_shown_where_all_is_asked_for():
    memory = seen(300, 300, gpu=2000)
    assert memory.tables() == []
    memory.asked = True
    assert memory.tables()[0].rows[0] == ["rank 0", "300 MB", "300 MB", "300 MB"]
    assert memory.shown == ["memory in MB, by second", "GPU memory in MB, by second"]


def test_gpu_memory_is_the_ranks_own_where_the_driver_reports_it():
    memory = Memory()
    memory.asked = True
    for own_mb in (0, 500):
        memory.take(replace(pulse(0, 300, 2000), gpu_own_nbytes=own_mb * MB), own_mb)
    (series,) = (s for key, s in memory.curves.series.items() if "GPU" in key.name)
    assert list(series.values) == [2000, 500]


def test_the_page_gets_what_concerns_gpus_only_of_ranks_that_have_one():
    tiles = CellModel([hello(0), hello(1)]).tiles
    tiles.take(pulse(0, 300))
    tiles.take(pulse(1, 300, gpu_mb=2))
    first, second = tiles.news()
    assert not any(name.startswith("gpu") for name in first)
    assert second["gpu_nbytes"] == 2 * MB


def test_a_day_of_looks_is_bounded_and_its_peak_is_in_the_table():
    figures = CellModel([hello(0)])
    for second in range(86_400):
        figures.memory.take(pulse(0, 2000 if 40_000 < second < 50_000 else 500), second)
    (series,) = figures.memory.curves.series.values()
    assert len(series.values) <= 2000
    made = bundle(figures)
    assert "rank 0  500 MB  2 GB  500 MB" in made["text/plain"]
    assert len(made["text/html"]) < 20_000


def at_import(rank: int, module: str) -> Pulse:
    return Pulse(rank, 1, RUNNING, "In[1]:1", 1, 1, 0, importing=module)


def test_ranks_that_import_the_same_are_one_line_until_all_are_through() -> None:
    imports = Imports()
    assert imports.line() is None
    for rank in range(4):
        imports.take(at_import(rank, "tensorflow"))
    assert imports.line() == ("importing tensorflow on ranks 0–3", 0, 4)
    imports.take(at_import(2, ""))
    imports.left(3)
    assert imports.line() == ("importing tensorflow on ranks 0–3", 2, 4)
    imports.take(at_import(0, "sklearn"))
    imports.take(at_import(1, ""))
    assert imports.line() == ("importing sklearn on rank 0", 0, 1)
    imports.take(at_import(0, ""))
    assert imports.line() is None


def test_an_import_is_named_by_the_outermost_package(tmp_path, monkeypatch) -> None:
    package = tmp_path / "outer_package"
    package.mkdir()
    (package / "__init__.py").write_text("import outer_package.inner")
    (package / "inner.py").write_text("import inner_module")
    (tmp_path / "inner_module.py").write_text(
        "from allranks.engine.telemetry import importing\nseen = importing()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    __import__("outer_package.inner")
    assert sys.modules["inner_module"].seen == "outer_package"
    assert importing() == ""


def test_a_terminal_has_the_data_of_a_cell_from_the_first_record_on_with_the_ranks_that_left(
    capsys,
):
    hellos = [Hello(rank, 2, 0, 1, "here", rank, "cpu", "e", "m", "/l/x.log") for rank in range(2)]
    view = cell_view("auto", hellos, None, ago=60)
    view.left(0, "error")
    assert view.figures is None
    view.telemetry(Points(1, 1, (["loss", "", 1],), 0), [array("d", (3.0, 0.5)).tobytes()])
    assert view.figures.tiles.said() == "1 running, rank 0 failed"
    view.left(1, "ok")
    view.finish()
    assert view.figures.elapsed >= 60
    assert "loss" in capsys.readouterr().out
