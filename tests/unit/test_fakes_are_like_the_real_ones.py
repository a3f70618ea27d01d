"""Starts the suite that holds the fakes of cupy, NCCL and pynvml against the real ones.

ALLRANKS_TEST_CUPY names a Python that has them; ``make test`` makes one. None of it needs a GPU.
"""

import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("ALLRANKS_TEST_CUPY") or (util.find_spec("cupy") and sys.executable)


@pytest.mark.skipif(sys.platform != "linux", reason="cupy is made for Linux only")
@pytest.mark.skipif(
    not PYTHON,
    reason="needs cupy: pip install -r tests/fakes/requirements.txt for some Python, and "
    "ALLRANKS_TEST_CUPY=/path/to/that/python",
)
def test_the_fakes_and_what_is_asked_of_them_are_as_the_real_ones():
    done = subprocess.run(
        [
            *(PYTHON, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"),
            *("--import-mode=importlib", "-c", os.devnull, "tests/fakes/conformance_suite.py"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
