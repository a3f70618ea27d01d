"""The README's figures: written from ``results/``, between two markers, and nowhere else."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks import machine, results

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- figures -->"
END = "<!-- /figures -->"
#: The others are for those who work on allranks.
ORDER = ("start", "cells", "output", "ensemble")


def section(measured: list[dict[str, Any]]) -> str:
    """Returns the tables of the results, each with its date, and the machines below them."""
    parts: list[str] = []
    machines: dict[str, dict[str, float]] = {}
    for result in measured:
        parts.append(importlib.import_module(f"benchmarks.{result['name']}").table(result))
        where = f"{result['date']} on {machine.sentence(result['machine'])}"
        machines.setdefault(where, {})[result["name"]] = result["machine"]["load_before"][0]
    measured_on = [
        f"Measured {where}. Load of the machine before each: "
        + ", ".join(f"{name} {load:.1f}" for name, load in loads.items())
        + ". The sides take turns, so that it meets all alike."
        for where, loads in machines.items()
    ]
    how = "`make bench` measures again; every sample is in `benchmarks/results/`."
    return "\n\n".join([*parts, *measured_on, how])


def insert(text: str, figures: str) -> str:
    """Returns the text with the figures between its markers.

    Raises:
        ValueError: the markers are not there.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END}, found no such pair. Add both.")
    return f"{head}{BEGIN}\n{figures}\n{END}{tail}"


def update_readme() -> None:
    """Writes the README's figures anew."""
    measured = [results.read(name) for name in ORDER if (results.FOLDER / f"{name}.json").exists()]
    README.write_text(insert(README.read_text(), section(measured)))
