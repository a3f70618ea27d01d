"""Suites of ``ranks/`` that need no mpiexec of their own: by ``pytest --nranks``."""

from __future__ import annotations

import os
import sys

import pytest
from launch import ROOT, run

RANKS = ROOT / "tests" / "mpi" / "ranks"
#: Of plugins only what they need: each rank would load all that are installed.
PLUGINS = ("allranks.features.pytest.plugin",)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("suite", "numbers"), [("kinds", "2"), ("property", "1,3")])
def test_suites_pass(suite: str, numbers: str) -> None:
    ended = run(
        [
            *(sys.executable, "-m", "pytest", "-c", str(RANKS / "pytest.ini")),
            *("-q", "-rs", "-p", "no:cacheprovider", "-p", *PLUGINS, "--nranks", numbers),
            str(RANKS / f"{suite}_suite.py"),
        ],
        timeout=570,
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        PYTHONPATH=f"{ROOT}{os.pathsep}{RANKS}",
    )
    assert ended.returncode == 0, ended.stdout
    assert " passed" in ended.stdout
