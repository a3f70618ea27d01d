"""The figures of the README and of docs/benchmarks.md: what the samples say, and where."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import cells, ensemble, machine, output, panel, report, results, start, students

MACHINE = {
    "processor": "A processor",
    "cores": 2,
    "memory_gib": 8.0,
    "system": "Linux x86_64",
    "load_before": [0.3, 0.2, 0.1],
    "versions": {"python": "3.11.2"},
}


def result(name: str, **measured: Any) -> dict[str, Any]:
    return {"name": name, "date": "2026-01-02", "machine": MACHINE, **measured}


STARTS = result(
    "start",
    samples={"4": {"allranks": [1.0, 3.0, 2.0], "ipyparallel": [8.0, 9.0, 7.0]}},
)
CELLS = result(
    "cells",
    samples={"2": {"allranks": [5.0, 6.0], "ipyparallel": [10.0, 12.0], "kernel": [4.0, 4.0]}},
)
FLOOD = {"seconds": 2, "sent_nbytes": 1_500_000, "growth_nbytes": 3e6, "peak_nbytes": 4e6}
OUTPUT = result(
    "output",
    ranks=2,
    lines_a_rank=500,
    samples={
        "allranks": [FLOOD | {"kept_lines": 1000, "shown_lines": 70}],
        "ipyparallel": [FLOOD | {"kept_lines": 999, "shown_lines": 999}],
    },
)


def test_a_start_is_told_as_median_and_least_with_the_ratio_of_medians() -> None:
    assert start.table(STARTS).endswith("| 4 | 2.00 (1.00) | 8.00 (7.00) | 4.0 |")


def test_a_cell_is_told_by_how_many_times_faster_it_is() -> None:
    row = "| 2 | 5.5 (5.0) | 11.0 (10.0) | 4.0 (4.0) | 2.0 |"
    assert cells.table(CELLS).endswith(row)


def test_a_flood_is_told_in_megabytes_and_lines_kept() -> None:
    table = output.table(OUTPUT)
    assert "| sent to the front end, MB | 1.50 | 1.50 |" in table
    assert "| lines kept, of 1,000 | 1,000 | 999 |" in table


ENSEMBLE = result(
    "ensemble",
    members=64,
    ranks=4,
    uneven_seconds=[0.1, 0.7],
    ms_a_member={
        "1": {"loop": [0.1, 0.2], "allranks": [8.0, 10.0]},
        "4": {"loop": [0.1, 0.2], "allranks": [4.0, 5.0], "ipyparallel": [6.0, 8.0]},
    },
    utilisation={"allranks": [0.94, 0.96], "ipyparallel": [0.91, 0.93]},
)


def test_an_ensemble_is_told_by_what_a_member_takes_and_how_much_is_filled() -> None:
    told = ensemble.table(ENSEMBLE)
    assert "| `%%ensemble` | 9.0 (8.0) | 4.5 (4.0) | 95 % |" in told
    assert told.endswith("| `ipyparallel` | – | 7.0 (6.0) | 92 % |")
    assert "64 members that sleep between 0.1 and 0.7 s" in told


def looked(turn: int, view: str, share: float) -> dict[str, Any]:
    sample = {"side": "now", "ranks": 4, "turn": turn, "view": view, "cpu_share": share}
    return {**sample, "nbytes_a_second": 10_000.0, "steps_a_second": 20.0}


def test_a_panel_is_told_by_what_it_takes_more_than_text() -> None:
    samples = [looked(0, "plain", 0.02), looked(0, "auto", 0.05), looked(1, "plain", 0.04)]
    table = panel.table(result("panel", seconds=20, samples=[*samples, looked(1, "auto", 0.05)]))
    assert "| 4 ranks, `--view plain` | 600 | 3.0 | – | 20.0 |" in table
    assert table.endswith("| 4 ranks, `--view auto` | 600 | 5.0 | 2.0 | 20.0 |")


SAMPLE = {"processes": 18, "idle_cpu_seconds": 0.2, "watched_seconds": 5.0, "load_before": 0.3}
STUDENTS = result(
    "students",
    samples=[
        SAMPLE | {"ranks": 2, "students": 2, "step": step, "seconds": seconds, "pss_nbytes": nbytes}
        for step, seconds, nbytes in (("started", 4.0, 400e6), ("digits", 20.0, 2400e6))
    ],
)


def test_a_class_of_students_is_told_by_what_one_of_them_takes() -> None:
    table = students.table(STUDENTS)
    assert "| 2 | 2 | 200 | 1,200 |" in table
    assert "| 2 | 2 | 4.0 | 20.0 |" in table
    assert table.endswith("used at most 2.0 % of one core per student.")


def test_results_of_one_machine_name_it_once() -> None:
    text = report.section([STARTS, CELLS, OUTPUT])
    assert text.count("Measured 2026-01-02 on A processor, 2 cores, 8 GiB, Linux x86_64") == 1
    assert "start 0.3, cells 0.3, output 0.3" in text


def test_the_readme_has_a_row_for_each_result() -> None:
    assert report.at_a_glance([STARTS, CELLS, OUTPUT, ENSEMBLE]).splitlines() == [
        "|  | allranks | ipyparallel | times faster |",
        "| --- | ---: | ---: | ---: |",
        "| from start to the first reply of 4 ranks | 2.0 s | 8.0 s | 4.0 |",
        "| round trip of a cell with `pass` on 2 ranks | 5.5 ms | 11.0 ms | 2.0 |",
        "| 2 ranks print 500 lines each | 2.0 s | 2.0 s | 1.0 |",
        "| overhead of an ensemble's member on 4 ranks | 4.5 ms | 7.0 ms | 1.6 |",
        "",
        "Medians, measured 2026-01-02 on 2 cores.",
    ]


def test_readme_and_page_show_what_was_measured() -> None:
    for page, names, figures in (
        (report.PAGE, report.ORDER, report.section),
        (report.README, report.AT_A_GLANCE, report.at_a_glance),
    ):
        text = page.read_text()
        assert text == report.insert(text, figures([results.read(name) for name in names]))


def test_only_what_stands_between_the_markers_is_written() -> None:
    before = f"head\n{report.BEGIN}\nold\n{report.END}\ntail\n"
    assert report.insert(before, "new") == f"head\n{report.BEGIN}\nnew\n{report.END}\ntail\n"


def test_a_readme_without_markers_is_left_alone() -> None:
    with pytest.raises(ValueError, match="Add both"):
        report.insert("head\ntail\n", "new")


def test_the_machine_is_described_with_the_versions_measured() -> None:
    assert {"python", "ipyparallel"} <= machine.describe()["versions"].keys()
