"""Runs the suites in ``ranks/`` on every rank of an mpiexec.

    mpiexec -n 4 python tests/mpi/run.py [suite ...] [pytest options]

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


def main() -> int:
    import allranks.collectives as c

    chosen = [a for a in sys.argv[1:] if not a.startswith("-")]
    options = [a for a in sys.argv[1:] if a.startswith("-")]
    suites = [str(RANKS / f"{name}_suite.py") for name in chosen] or [str(RANKS)]
    sys.path.insert(0, str(RANKS))
    c.init()
    said = io.StringIO()
    # A folder a rank: pytest tidies up one that it shares, and the ranks fall over each other.
    with redirect_stdout(said), tempfile.TemporaryDirectory() as folder:
        always = ["-c", str(RANKS / "pytest.ini"), "-q", "-p", "no:cacheprovider"]
        code = pytest.main([*always, f"--basetemp={folder}/pytest", *options, *suites])
    if c.rank() == 0 or code:
        os.write(1, f"rank {c.rank()} of {c.size()}\n{said.getvalue()}\n".encode())
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
