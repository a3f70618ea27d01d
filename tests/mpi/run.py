"""Runs the suites in ``ranks/`` on every rank of an mpiexec.

    mpiexec -n 4 python tests/mpi/run.py [suite or file ...] [pytest options]

Every rank runs the same tests in the same order. Only the first rank reports what passed; a rank
on which a test failed reports that.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest

RANKS = Path(__file__).resolve().parent / "ranks"


def pin(uuids: list[str]) -> None:
    """Shows this rank one GPU, taken in turn, before anything opens CUDA."""
    from allranks.engine import libraries

    rank = next(int(os.environ[n]) for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if n in os.environ)
    size = next(int(os.environ[n]) for n in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if n in os.environ)
    libraries.set_variables(os.environ, libraries.pinning(uuids, rank, size)[1])


def main() -> int:
    if os.environ.get("ALLRANKS_TEST_GPUS"):
        pin(os.environ["ALLRANKS_TEST_GPUS"].split(","))
    from mpi4py import MPI

    import allranks.collectives as c
    from allranks.collectives.start.runtime import finish
    from allranks.collectives.start.under_mpi import guard_mpi4py

    chosen = [a for a in sys.argv[1:] if not a.startswith("-")]
    options = [a for a in sys.argv[1:] if a.startswith("-")]
    # No suite uses what each rank of each launch would load: every plugin of pytest's that is
    # installed, and with Keras these two, for a third of TensorFlow's own time.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in ("matplotlib", "sklearn"):
        sys.modules[name] = None  # type: ignore[assignment]
    suites = [a if a.endswith(".py") else str(RANKS / f"{a}_suite.py") for a in chosen]
    suites = suites or [str(RANKS)]
    sys.path.insert(0, str(RANKS))
    c.init()
    if "ALLRANKS_TEST_GUARDED" in os.environ:
        guard_mpi4py(c.world.current())
    # Past pytest, which keeps what is written until a test has ended.
    os.environ["ALLRANKS_TEST_STDERR"] = str(os.dup(2))
    if "ALLRANKS_TEST_REPORT" in os.environ:
        options.append(f"--junitxml={os.environ['ALLRANKS_TEST_REPORT']}{c.rank()}.xml")
    said = io.StringIO()
    # A folder a rank: pytest tidies up one that it shares, and the ranks fall over each other.
    with redirect_stdout(said), tempfile.TemporaryDirectory() as folder:
        always = ["-c", str(RANKS / "pytest.ini"), "-q", "-p", "no:cacheprovider"]
        code = pytest.main([*always, f"--basetemp={folder}/pytest", *options, *suites])
    if c.rank() == 0 or code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        os.write(1, f"rank {c.rank()} of {c.size()}\n{said.getvalue()}\n".encode())
    # The suites' scopes are a notebook's, whose ranks wait only two seconds for each other's end:
    # a rank whose pytest tidies up for longer would be left, and mpiexec report a failed job.
    MPI.COMM_WORLD.Barrier()
    finish()
    # A module that skips as a whole has said why; a -k that selects nothing has not.
    named = any(option.startswith("-k") for option in options)
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED and not named else int(code)


if __name__ == "__main__":
    raise SystemExit(main())
