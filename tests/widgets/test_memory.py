"""The memory of ranks over a cell: shown where it changes, or where all is asked for."""

from __future__ import annotations

import pytest

from allranks.records.telemetry import Pulse
from allranks.widgets.dashboard.cell_model import CellModel, Memory
from allranks.widgets.dashboard.saved_panel import bundle
from tests.widgets.test_stores import hello

MB = 1_000_000


def pulse(rank: int, rss_mb: int, gpu_mb: int = 0) -> Pulse:
    return Pulse(rank, 1, "", "In[1]:1", rss_mb * MB, 50, gpu_mb * MB)


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


def test_memory_that_does_not_change_is_shown_where_all_is_asked_for():
    memory = seen(300, 300)
    assert memory.tables() == []
    memory.asked = True
    (table,) = memory.tables()
    assert table.rows[0] == ["rank 0", "300 MB", "300 MB", "300 MB"]


def test_the_memory_of_gpus_is_a_curve_of_its_own():
    memory = seen(300, 900, gpu=2000)
    memory.asked = True
    assert memory.shown == ["memory in MB, by second", "GPU memory in MB, by second"]


def test_a_day_of_looks_is_bounded_and_its_peak_is_in_the_table():
    figures = CellModel([hello(0)])
    for second in range(86_400):
        figures.memory.take(pulse(0, 2000 if 40_000 < second < 50_000 else 500), second)
    (series,) = figures.memory.curves.series.values()
    assert len(series.values) <= 2000
    made = bundle(figures)
    assert "rank 0  500 MB  2 GB  500 MB" in made["text/plain"]
    assert len(made["text/html"]) < 20_000
