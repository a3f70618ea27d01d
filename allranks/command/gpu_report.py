"""``allranks doctor --gpu``: runs the suites for GPUs here, and writes a report to send."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import allranks
from allranks.errors import MissingDependency, UsageError

#: The parts that have not begun after this time are left out.
_SECONDS = 300
_PACKAGE = Path(allranks.__file__).parent
#: In a wheel, and in a checkout; pyproject.toml copies the files of a checkout into the wheel.
_PLACES = (_PACKAGE / "gpu_suites", _PACKAGE.parent)
_PARTS = Path("tests", "gpu", "parts.py")


def run(report: str) -> int:
    """Runs the suites; returns 0 if every part that could run has passed."""
    parts = next((place / _PARTS for place in _PLACES if (place / _PARTS).is_file()), None)
    if parts is None:
        raise UsageError(
            "the suites for GPUs are missing. Type: pip install --force-reinstall allranks"
        )
    if find_spec("pytest") is None:
        raise MissingDependency(
            "the suites for GPUs need pytest, which is not installed. "
            "Type: pip install 'allranks[gpu-report]'"
        )
    file = Path(report).absolute()
    before = file.read_bytes() if file.exists() else b""
    options = ["--report", str(file), "--seconds", str(_SECONDS)]
    code = subprocess.run([sys.executable, str(parts), *options], check=False).returncode
    if file.exists() and file.read_bytes() != before:
        sys.stdout.write(
            f"The report is {file}. It has the versions, the GPU's name, the results, and the "
            "output of tests that failed. Read it before you send it: output may name folders.\n"
        )
    return code
