"""The figures of the README and of docs/benchmarks.md: what the samples say, and where."""

import subprocess
from multiprocessing.connection import Client
from typing import Any

import pytest

from benchmarks import collectives, hub, launches, report, results, students

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


SAMPLE = {"processes": 18, "idle_cpu_seconds": 0.2, "watched_seconds": 5.0, "load_before": 0.3}
STUDENTS = result(
    "students",
    samples=[
        SAMPLE | {"ranks": 2, "students": 2, "step": step, "seconds": seconds, "pss_nbytes": nbytes}
        for step, seconds, nbytes in (("started", 4.0, 400e6), ("digits", 20.0, 2400e6))
    ],
)


def test_a_class_of_students_is_told_by_what_one_of_them_takes():
    table = students.table(STUDENTS)
    assert "| 2 | 2 | 200 | 1,200 |" in table
    assert "| 2 | 2 | 4.0 | 20.0 |" in table
    assert table.endswith("used at most 2.0 % of one core per student.")


def test_a_hostile_student_is_measured_by_the_95th_percentile_of_the_others():
    slow = [0.01] * 90 + [0.03] * 10
    sample = {"what": "a loop", "load": 3.4, "before": [0.02] * 100, "during": slow}
    table = hub.section(result("hub", samples=[sample]))
    assert "| a loop | 20 | 30 | 1.50 |" in table
    assert table.endswith("Load of the machine: 3 to 3.")


def test_an_allreduce_is_compared_with_the_fastest_mpi():
    def row(nbytes: int) -> dict[str, Any]:
        seconds = {"Open MPI": 2e-6, "Intel MPI": 1e-6, "private": 3e-6, "window": 0.5e-6}
        return {"nbytes": nbytes, "seconds": seconds}

    run = {
        "ranks": 2,
        "mpis": {"Open MPI": "5.0", "Intel MPI": "2021.18"},
        "gloo": False,
        "allreduce": [row(nbytes) for nbytes in collectives.GLANCE],
        "grouping": {"grouped": 1.0, "one by one": 2.0},
        "late": {"ours": 0.1, "mpi4py": 1.0},
    }
    measured = result("collectives", runs=[run])
    assert "| 4 | 2.0 | 1.0 | 3.0 | 0.5 | 3.00 | 0.50 |" in collectives.table(measured)
    sentence = collectives.at_a_glance(measured)
    assert "3.00 times as long as with mpi4py on the fastest of Open MPI and Intel MPI" in sentence
    name = collectives.short_name("Intel(R) MPI Library 2021.18.1 for Linux* OS")
    assert (name, collectives.number_of("Open MPI v5.0.11, package")) == ("Intel MPI", "5.0.11")


def test_a_turn_takes_as_long_as_the_slowest_rank_of_one_launch(monkeypatch):
    turns = []

    def ranks(size: int, *_: str, **settings: str) -> subprocess.CompletedProcess[str]:
        name = settings[launches.NAME]
        links = [Client(settings[launches.ADDRESS]) for _ in range(size)]
        for rank, link in enumerate(links):
            link.send((name, rank, "an MPI"))
            link.recv()
        while any(requests := [link.recv() for link in links]):
            turns.append((name, requests[0]))
            for rank, link in enumerate(links):
                link.send(1.0 + rank)
        return subprocess.CompletedProcess([], 0, f"of {name}")

    monkeypatch.setattr("tests.mpi.launch.mpiexec", ranks)
    with launches.side_by_side(2, {"a": ("python",), "b": ("python",)}) as found:
        assert [found[name].turn("mpi4py", 64, 10) for name in "ba"] == [2.0, 2.0]
    assert turns == [("b", ("mpi4py", 64, 10)), ("a", ("mpi4py", 64, 10))]
    assert found["a"].output.result() == "of a"


def test_ranks_that_fail_before_their_first_turn_end_a_measurement(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "no library")
    monkeypatch.setattr("tests.mpi.launch.mpiexec", lambda *_, **__: failed)
    with (
        pytest.raises(RuntimeError, match=r"2 ranks of [ab] have failed:\nno library"),
        launches.side_by_side(2, {"a": ("python",), "b": ("python",)}),
    ):
        pass


def test_readme_and_page_show_what_was_measured():
    for page, names, figures in (
        (report.PAGE, report.ORDER, report.section),
        (report.README, report.AT_A_GLANCE, report.at_a_glance),
    ):
        text = page.read_text()
        assert text == report.insert(text, figures([results.read(name) for name in names]))


def test_only_what_stands_between_the_markers_is_written():
    before = f"head\n{report.BEGIN}\nold\n{report.END}\ntail\n"
    assert report.insert(before, "new") == f"head\n{report.BEGIN}\nnew\n{report.END}\ntail\n"
    with pytest.raises(ValueError, match="Add both"):
        report.insert("head\ntail\n", "new")


def test_the_machine_is_described_with_the_versions_measured():
    assert {"python", "ipyparallel"} <= results.machine()["versions"].keys()
