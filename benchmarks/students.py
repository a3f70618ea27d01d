"""What students cost a host: memory, idle processor time and processes of a notebook with ranks.

Memory is the proportional set size: pages that processes share count once, divided among them. So
the sum over all processes is what the host is short of, and a second student costs less than
the first. Linux only.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from contextlib import ExitStack
from typing import Any

import psutil

from benchmarks import frontend, machine, results
from benchmarks.frontend import FrontEnd

SIZES = (2, 4)
STUDENTS = (1, 3)
DIGITS = """%%distributed
import numpy as np
import matplotlib.pyplot as plt
from sklearn.datasets import load_digits
digits = load_digits()
"""
TENSORFLOW = "%%distributed\nimport tensorflow as tf"
STEPS = {"started": None, "digits": DIGITS, "tensorflow": TENSORFLOW}
WORDS = {
    "started": "ranks started",
    "digits": "numpy, matplotlib, scikit-learn imported on every rank",
    "tensorflow": "and TensorFlow",
}
_SETTLE_SECONDS, _WATCHED_SECONDS = 1.0, 5.0


def main() -> None:
    """Measures, writes ``results/students.json`` and prints its table."""
    described = machine.describe()
    steps = [step for step in STEPS if step != "tensorflow" or _has_tensorflow()]
    samples = [
        sample for n in SIZES for students in STUDENTS for sample in _class(n, students, steps)
    ]
    print(table(results.write("students", described, {"samples": samples})))


def table(result: dict[str, Any]) -> str:
    """Returns the figures as markdown."""
    rows = []
    for s in result["samples"]:
        each = s["pss_nbytes"] / s["students"] / 1e6
        idle = 100 * s["idle_cpu_seconds"] / s["watched_seconds"] / s["students"]
        counts = [s["ranks"], s["students"], s["processes"] // s["students"]]
        rows.append([WORDS[s["step"]], *map(str, counts), f"{each:,.0f}", f"{idle:.1f}"])
    head = ["after", "ranks", "students", "processes each", "MB each", "idle, % of a core each"]
    return "What one of several students takes, kernel and all.\n\n" + results.markdown(head, rows)


def _class(n: int, students: int, steps: list[str]) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        ends = [stack.enter_context(frontend.front_end()) for _ in range(students)]
        for end in ends:
            end.do(frontend.LOAD)
            end.do(frontend.START.format(n=n))
        return [_measure(ends, n, step) for step in steps]


def _measure(ends: list[FrontEnd], n: int, step: str) -> dict[str, Any]:
    if STEPS[step]:
        for end in ends:
            end.do(STEPS[step])
    time.sleep(_SETTLE_SECONDS)
    processes = [process for end in ends for process in _processes(end)]
    before = _cpu_seconds(processes)
    time.sleep(_WATCHED_SECONDS)
    return {
        "step": step,
        "ranks": n,
        "students": len(ends),
        "processes": len(processes),
        "pss_nbytes": sum(process.memory_full_info().pss for process in processes),
        "rss_nbytes": sum(process.memory_info().rss for process in processes),
        "idle_cpu_seconds": _cpu_seconds(processes) - before,
        "watched_seconds": _WATCHED_SECONDS,
    }


def _processes(end: FrontEnd) -> list[psutil.Process]:
    return [psutil.Process(end.pid), *end.children()]


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(statistics.fsum(process.cpu_times()[:2]) for process in processes)


def _has_tensorflow() -> bool:
    return importlib.util.find_spec("tensorflow") is not None


if __name__ == "__main__":
    main()
