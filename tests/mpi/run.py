"""Runs the suites in ``ranks/`` on every rank of an mpiexec.

    mpiexec -n 4 python tests/mpi/run.py [suite or file ...] [pytest options]
    mpiexec -n 4 python tests/mpi/run.py communicator + ALLRANKS_RANKS_PER_HOST=2 hosts contract

Every rank runs the same tests in the same order. Only the first rank reports what passed; a rank
on which a test failed reports that. After each ``+`` the same processes are the ranks of a new
world, with the variables of the environment that are named among its suites.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from itertools import groupby
from pathlib import Path

import pytest

RANKS = Path(__file__).resolve().parent / "ranks"


def pin(uuids: list[str]) -> None:
    """Shows this rank one GPU, taken in turn, before anything opens CUDA."""
    from allranks.engine import libraries

    rank = next(int(os.environ[n]) for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if n in os.environ)
    size = next(int(os.environ[n]) for n in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if n in os.environ)
    libraries.set_variables(os.environ, libraries.pinning(uuids, rank, size)[1])


def split(words: Sequence[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The variables and the suites of each world, between words ``+``."""
    for plus, group in groupby(words, "+".__eq__):
        if not plus:
            one = list(group)
            yield (
                dict(word.split("=", 1) for word in one if "=" in word),
                [word for word in one if "=" not in word],
            )


def forget_suites() -> None:
    """Lets the next world's suites be imported anew: they read its size and its variables."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{RANKS}{os.sep}"):
            del sys.modules[name]


def main() -> int:
    if os.environ.get("ALLRANKS_TEST_GPUS"):
        pin(os.environ["ALLRANKS_TEST_GPUS"].split(","))
    from mpi4py import MPI

    import allranks.collectives as c
    from allranks.collectives.start.runtime import finish

    options = [a for a in sys.argv[1:] if a.startswith("-")]
    worlds = [*split([a for a in sys.argv[1:] if not a.startswith("-")])] or [({}, [])]
    # No suite uses what each rank of each launch would load: every plugin of pytest's that is
    # installed, and with Keras these two, for a third of TensorFlow's own time.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in ("matplotlib", "sklearn"):
        sys.modules[name] = None  # type: ignore[assignment]
    sys.path.insert(0, str(RANKS))
    # Past pytest, which keeps what is written until a test has ended.
    os.environ["ALLRANKS_TEST_STDERR"] = str(os.dup(2))
    own, whole = dict(os.environ), MPI.COMM_WORLD
    for settings, suites in worlds:
        if c.is_initialized():
            # The suites' scopes are a notebook's, whose world does not end.
            c.world.current().notebook = False
            c.shutdown()
            forget_suites()
        for name in os.environ.keys() - own.keys():
            del os.environ[name]
        os.environ.update(own | settings)
        sys.path.extend(filter(None, settings.get("PYTHONPATH", "").split(os.pathsep)))
        code = run(suites, options)
        # All stop together. And the suites' scopes are a notebook's, whose ranks wait only two
        # seconds for each other's end: a rank whose pytest tidies up for longer would be left, and
        # mpiexec report a failed job.
        if whole.allreduce(code, MPI.MAX):
            break
    finish()
    return code


def run(suites: Sequence[str], options: Sequence[str]) -> int:
    """Runs suites in a world of their own, and returns pytest's exit status."""
    import allranks.collectives as c
    from allranks.collectives.start.under_mpi import guard_mpi4py

    files = [a if a.endswith(".py") else str(RANKS / f"{a}_suite.py") for a in suites]
    files, options = files or [str(RANKS)], [*options]
    c.init()
    if "ALLRANKS_TEST_GUARDED" in os.environ:
        guard_mpi4py(c.world.current())
    if "ALLRANKS_TEST_REPORT" in os.environ:
        options.append(f"--junitxml={os.environ['ALLRANKS_TEST_REPORT']}{c.rank()}.xml")
    said = io.StringIO()
    # A folder a rank: pytest tidies up one that it shares, and the ranks fall over each other.
    with redirect_stdout(said), tempfile.TemporaryDirectory() as folder:
        always = ["-c", str(RANKS / "pytest.ini"), "-q", "-p", "no:cacheprovider"]
        code = pytest.main([*always, f"--basetemp={folder}/pytest", *options, *files])
    if c.rank() == 0 or code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        os.write(1, f"rank {c.rank()} of {c.size()}\n{said.getvalue()}\n".encode())
    # A module that skips as a whole has said why; a -k that selects nothing has not.
    named = any(option.startswith("-k") for option in options)
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED and not named else int(code)


if __name__ == "__main__":
    raise SystemExit(main())
