"""The files in ``results/``: every sample of a measurement, and the machine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("results")


def write(name: str, machine: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Writes ``results/NAME.json`` and returns its content."""
    result = {"name": name, "date": date.today().isoformat(), "machine": machine, **measured}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def read(name: str) -> dict[str, Any]:
    """Returns the content of ``results/NAME.json``."""
    result: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return result


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def middle_and_least(samples: Sequence[float], digits: int = 1) -> str:
    """Returns ``median (minimum)``."""
    return f"{statistics.median(samples):.{digits}f} ({min(samples):.{digits}f})"


def times_faster(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Returns the ratio of the medians, theirs to ours."""
    return f"{statistics.median(theirs) / statistics.median(ours):.1f}"


def compared(
    what: str, ours: Sequence[float], theirs: Sequence[float], unit: str, digits: int = 1
) -> list[str]:
    """Returns a row of the README's table: both medians and their ratio."""
    medians = [f"{statistics.median(side):.{digits}f} {unit}" for side in (ours, theirs)]
    return [what, *medians, times_faster(theirs, ours)]
