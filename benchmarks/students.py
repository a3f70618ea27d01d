"""What students cost a host: memory, idle processor time and processes of a notebook with ranks.

Memory is the proportional set size: pages that processes share count once, divided among them. So
the sum over all processes is what the host is short of, and a second student costs less than
the first. Linux only.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks import frontend, machine, report, results
from benchmarks.frontend import FrontEnd

PAGE = Path(__file__).resolve().parent.parent / "docs" / "teaching.md"
CLASSES = ((1, 2), (3, 2), (1, 4))
"""How many students, and how many ranks each."""
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
    "digits": "numpy, matplotlib, scikit-learn on every rank",
    "tensorflow": "and TensorFlow",
    "preloaded": "TensorFlow, with `--preload tensorflow`",
}
LIGHT, HEAVY = ("started", "digits"), ("tensorflow",)
_SETTLE_SECONDS, _WATCHED_SECONDS = 1.0, 5.0


def main() -> None:
    """Measures, writes ``results/students.json`` and the table of docs/teaching.md."""
    described = machine.describe()
    heavy = importlib.util.find_spec("tensorflow") is not None
    samples = []
    for students, n in CLASSES:
        samples += _class(students, n, "", LIGHT + HEAVY if heavy else LIGHT)
        if heavy:
            samples += _class(students, n, "--preload tensorflow", ("preloaded",))
    result = results.write("students", described, {"samples": samples})
    measured_on = f"Measured {result['date']} on {machine.sentence(described)}."
    figures = f"{table(result)}\n\n{measured_on}"
    PAGE.write_text(report.insert(PAGE.read_text(), figures))
    print(figures)


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


def _class(students: int, n: int, options: str, steps: Iterable[str]) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        ends = [stack.enter_context(frontend.front_end()) for _ in range(students)]
        for end in ends:
            end.do(frontend.LOAD)
            end.do(f"{frontend.START.format(n=n)} {options}")
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


if __name__ == "__main__":
    main()
