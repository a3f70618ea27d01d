"""A report of what ran on a GPU: written under benchmarks/results/, where there is a GPU."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mpi"))
REPORT = ROOT / "benchmarks" / "results" / "gpu_tests.json"

runs: list[dict[str, Any]] = []


def described(path: Path) -> dict[str, Any]:
    """What a JUnit file of one rank says: who passed, who failed, why others did not run."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed = [c.get("name") for c in cases if c.find("failure") is not None]
    failed += [c.get("name") for c in cases if c.find("error") is not None]
    skipped: dict[str, int] = {}
    for case in cases:
        why = case.find("skipped")
        if why is not None:
            reason = why.get("message") or ""
            skipped[reason] = skipped.get(reason, 0) + 1
    passed = len(cases) - len(failed) - sum(skipped.values())
    return {"passed": passed, "failed": failed, "skipped": skipped}


@pytest.fixture
def on_gpus(tmp_path: Path) -> Callable[..., None]:
    """Runs suites on so many ranks, which take the host's GPUs in turn, and notes how they went."""
    from launch import mpiexec

    from allranks.cluster import devices

    def run(ranks: int, *suites: str, **settings: str) -> None:
        ended = mpiexec(
            ranks,
            str(ROOT / "tests" / "mpi" / "run.py"),
            *suites,
            timeout=880,
            ALLRANKS_TEST_GPUS=",".join(gpu.uuid for gpu in devices.visible_gpus()),
            ALLRANKS_TEST_REPORT=str(tmp_path / "rank"),
            **settings,
        )
        own = tmp_path / "rank0.xml"
        if own.exists():
            said = described(own)
            runs.append({"ranks": ranks, "suites": suites, "settings": settings, **said})
        assert ended.returncode == 0, ended.stdout

    return run


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not runs:
        return
    from benchmarks.gpu import machine

    report = {"name": "gpu_tests", "date": date.today().isoformat(), **machine(), "runs": runs}
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
