"""One hostile student among ten on a JupyterHub: what it does to the cells of the others.

The hub has the configuration of docs/jupyterhub.md. Every student has two ranks. The others run a
cell with ``pass`` one after the other, before the hostile cell and while it runs, because the load
of the machine changes. Linux only, as root.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import report, results

PAGE = Path(__file__).resolve().parent.parent / "docs" / "jupyterhub.md"
STUDENTS = 10
_ROUNDS = 24
_SETTLE_SECONDS = 3.0
_PAUSE_SECONDS = 0.02
FORKS = """
import os, time
while True:
    try:
        if os.fork() == 0:
            {}
    except BlockingIOError:
        time.sleep(0.01)
"""
HOSTILE = {
    "processes without end, which sleep": FORKS.format("time.sleep(300)"),
    "processes without end, which compute": FORKS.format("while True: pass"),
    "arrays of 10 GB, without end": """
import numpy as np
while True:
    try: np.ones(1_250_000_000)
    except MemoryError: held = np.ones(100_000_000)
""",
    "output without end": "while True: print('x' * 1000)",
    "a loop that never ends": "while True: pass",
}


def main() -> None:
    """Measures, writes ``results/hub.json`` and the table of docs/jupyterhub.md."""
    from tests.hub.hub import Hub, Student

    def open_one(name: str) -> Student:
        student = hub.student(name)
        for source in ("%load_ext allranks", "%%distributed -n 2\npass"):
            student.run(source)
        return student

    described = results.machine()
    samples = []
    names = tuple(f"s{number}" for number in range(STUDENTS))
    with (
        tempfile.TemporaryDirectory(prefix="hub-", ignore_cleanup_errors=True) as folder,
        Hub(Path(folder), names) as hub,
    ):
        others = [open_one(f"s{number}") for number in range(1, STUDENTS)]
        for what, source in HOSTILE.items():
            hostile = open_one("s0")
            time.sleep(_SETTLE_SECONDS)  # to start a server and ranks is work, too
            before = _seconds(others)
            hostile.begin(f"%%distributed\n{source}")
            time.sleep(_SETTLE_SECONDS)
            load = round(os.getloadavg()[0], 1)
            during = _seconds(others)
            samples.append({"what": what, "load": load, "before": before, "during": during})
            hub.stop("s0")
    result = results.write("hub", described, {"samples": samples})
    PAGE.write_text(report.insert(PAGE.read_text(), section(result)))
    print(section(result))


def _seconds(students: Iterable[Any]) -> list[float]:
    took = []
    for _ in range(_ROUNDS):
        for student in students:
            began = time.perf_counter()
            if said := student.run("%%distributed\npass"):
                raise RuntimeError(said)
            took.append(time.perf_counter() - began)
            time.sleep(_PAUSE_SECONDS)
    return took


def section(result: dict[str, Any]) -> str:
    def row(sample: dict[str, Any]) -> list[str]:
        quiet, loud = (
            statistics.quantiles(sample[name], n=20)[-1] for name in ("before", "during")
        )
        return [sample["what"], f"{1000 * quiet:.0f}", f"{1000 * loud:.0f}", f"{loud / quiet:.2f}"]

    head = ["the hostile student's cell", "before, ms", "during, ms", "ratio"]
    loads = [sample["load"] for sample in result["samples"]]
    return (
        f"{results.markdown(head, map(row, result['samples']))}\n\n"
        f"The 95th percentile of a cell with `pass` of {STUDENTS - 1} other students. "
        f"Measured {result['date']} on {results.sentence(result['machine'])}. "
        f"Load of the machine: {min(loads):.0f} to {max(loads):.0f}."
    )
