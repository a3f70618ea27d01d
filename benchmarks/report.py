"""Writes the figures of docs/benchmarks.md and the README from ``results/``.

The figures are between two markers; the other text is not changed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks import results

REPOSITORY = Path(__file__).resolve().parent.parent
README = REPOSITORY / "README.md"
PAGE = REPOSITORY / "docs" / "benchmarks.md"
BEGIN = "<!-- figures -->"
END = "<!-- /figures -->"
# Other results are only for contributors.
ORDER = (
    *("start", "cells", "output", "ensemble", "collectives"),
    *("panel", "keeping", "hosts", "scale", "simulated_hosts"),
)
# The README has the comparisons with ipyparallel, and last, the one with the fastest MPI.
AT_A_GLANCE = ORDER[:5]


def section(measured: list[dict[str, Any]]) -> str:
    parts: list[str] = []
    machines: dict[str, dict[str, float]] = {}
    for result in measured:
        parts.append(importlib.import_module(f"benchmarks.{result['name']}").table(result))
        where = f"{result['date']} on {results.sentence(result['machine'])}"
        machines.setdefault(where, {})[result["name"]] = result["machine"]["load_before"][0]
    measured_on = [
        f"Measured {where}. Load of the machine before each: "
        + ", ".join(f"{name} {load:.1f}" for name, load in loads.items())
        + ". The sides run in turns, so it affects all of them."
        for where, loads in machines.items()
    ]
    how = "`make bench` repeats the measurements. `benchmarks/results/` has every sample."
    return "\n\n".join([*parts, *measured_on, how])


def insert(text: str, figures: str) -> str:
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END}, found no such pair. Add both.")
    return f"{head}{BEGIN}\n{figures}\n{END}{tail}"


def at_a_glance(measured: list[dict[str, Any]]) -> str:
    # The README's table, and a sentence.
    *measured, collectives = measured
    rows = [
        importlib.import_module(f"benchmarks.{result['name']}").at_a_glance(result)
        for result in measured
    ]
    dates = " and ".join(sorted({result["date"] for result in measured}))
    machine = measured[0]["machine"]
    table = results.markdown(["", "allranks", "ipyparallel", "times faster"], rows)
    return (
        f"{table}\n\nMedians of several runs, measured {dates} on {machine['cores']} cores with "
        f"ipyparallel {machine['versions']['ipyparallel']}.\n\n"
        + importlib.import_module("benchmarks.collectives").at_a_glance(collectives)
    )


def update() -> None:
    measured = [results.read(name) for name in ORDER if (results.FOLDER / f"{name}.json").exists()]
    PAGE.write_text(insert(PAGE.read_text(), section(measured)))
    compared = [result for result in measured if result["name"] in AT_A_GLANCE]
    README.write_text(insert(README.read_text(), at_a_glance(compared)))
