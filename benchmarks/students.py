"""Memory, processor time and processes of students' notebooks with ranks on one host.

Every student has a kernel and ranks, and all students do each step at the same time, as in class.
Memory is the proportional set size: a page that processes share counts once, divided among them. So
the sum over all processes is the used memory of the host, and a second student needs less than the
first. Linux only.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks import frontend, report, results
from benchmarks.frontend import FrontEnd

PAGE = Path(__file__).resolve().parent.parent / "docs" / "teaching.md"
CLASSES = ((1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (4, 4))
"""Numbers of students at the same time, and of ranks per student."""
DIGITS = """%%distributed
import numpy as np
import matplotlib.pyplot as plt
from sklearn.datasets import load_digits
digits = load_digits()
"""
TENSORFLOW = "%%distributed\nimport tensorflow as tf"
STEPS = {"started": "", "digits": DIGITS, "tensorflow": TENSORFLOW, "preloaded": TENSORFLOW}
WORDS = {
    "started": "ranks started",
    "digits": "+ numpy, matplotlib, scikit-learn",
    "tensorflow": "+ TensorFlow",
    "preloaded": "ranks started with `--preload tensorflow`, TensorFlow",
}
LIGHT, HEAVY = ("started", "digits"), ("tensorflow",)
_SETTLE_SECONDS, _WATCHED_SECONDS, _CELL_SECONDS = 1.0, 5.0, 300.0


def main() -> None:
    """Measures, writes ``results/students.json`` and the table of docs/teaching.md."""
    described = results.machine()
    for package in ("matplotlib", "scikit-learn", "tensorflow"):
        with suppress(metadata.PackageNotFoundError):
            described["versions"][package] = metadata.version(package)
    heavy = importlib.util.find_spec("tensorflow") is not None
    samples = []
    for students, n in CLASSES:
        samples += _class(students, n, "", LIGHT + HEAVY if heavy else LIGHT)
        if heavy:
            samples += _class(students, n, "--preload tensorflow", ("preloaded",))
    result = results.write("students", described, {"samples": samples})
    figures = section(result)
    PAGE.write_text(report.insert(PAGE.read_text(), figures))
    print(figures)


def section(result: dict[str, Any]) -> str:
    loads = [sample["load_before"] for sample in result["samples"]]
    measured_on = (
        f"Measured {result['date']} on {results.sentence(result['machine'])}. "
        f"Load of the machine before each class: {min(loads):.1f} to {max(loads):.1f}."
    )
    return f"{table(result)}\n\n{measured_on}"


def table(result: dict[str, Any]) -> str:
    # Memory, then seconds, one row per class.
    classes: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for sample in result["samples"]:
        of_class = classes.setdefault((sample["ranks"], sample["students"]), {})
        of_class[sample["step"]] = sample
    steps = [step for step in WORDS if any(step in of_class for of_class in classes.values())]
    head = ["ranks each", "students", *(WORDS[step] for step in steps)]

    def rows(figure: Callable[[dict[str, Any]], str]) -> str:
        body = [
            [*map(str, of), *(figure(found[step]) if step in found else "–" for step in steps)]
            for of, found in sorted(classes.items())
        ]
        return results.markdown(head, body)

    idle = max(
        100 * s["idle_cpu_seconds"] / s["watched_seconds"] / s["students"]
        for s in result["samples"]
    )
    return (
        "Memory per student of the kernel, the ranks and their helper processes, in MB, after\n\n"
        f"{rows(lambda s: format(s['pss_nbytes'] / s['students'] / 1e6, ',.0f'))}\n\n"
        "Seconds until the last student has finished, if all students start at the same time\n\n"
        f"{rows(lambda s: format(s['seconds'], '.1f'))}\n\n"
        f"Idle ranks used at most {idle:.1f} % of one core per student."
    )


def _class(students: int, n: int, options: str, steps: Iterable[str]) -> list[dict[str, Any]]:
    load = round(os.getloadavg()[0], 2)
    with ExitStack() as stack:
        ends = [stack.enter_context(frontend.front_end()) for _ in range(students)]
        _together(ends, frontend.LOAD)
        started = _together(ends, f"{frontend.START.format(n=n)} {options}")
        return [_measure(ends, n, step, started) | {"load_before": load} for step in steps]


def _measure(ends: list[FrontEnd], n: int, step: str, started: float) -> dict[str, Any]:
    took = _together(ends, STEPS[step]) if STEPS[step] else 0.0
    time.sleep(_SETTLE_SECONDS)
    processes = [process for end in ends for process in _processes(end)]
    before = _cpu_seconds(processes)
    time.sleep(_WATCHED_SECONDS)
    return {
        "step": step,
        "ranks": n,
        "students": len(ends),
        "processes": len(processes),
        # With --preload the start includes the import.
        "seconds": took + (started if step in ("started", "preloaded") else 0.0),
        "pss_nbytes": sum(process.memory_full_info().pss for process in processes),
        "rss_nbytes": sum(process.memory_info().rss for process in processes),
        "idle_cpu_seconds": _cpu_seconds(processes) - before,
        "watched_seconds": _WATCHED_SECONDS,
    }


def _together(ends: list[FrontEnd], source: str) -> float:
    """Runs the cell for all students at once; returns the seconds until the last has finished."""
    began = time.perf_counter()
    cells = [end.start(source) for end in ends]
    for cell in cells:
        if cell.wait(_CELL_SECONDS).status != "ok":
            raise frontend.Failed(f"{source}\n{cell.text}")
    return time.perf_counter() - began


def _processes(end: FrontEnd) -> list[psutil.Process]:
    return [psutil.Process(end.pid), *end.children()]


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(statistics.fsum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    main()
