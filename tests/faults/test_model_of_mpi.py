"""Deaths of ranks reach the notebook in simulation as they do with Open MPI and its host agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.simulated.mpi_scripts import SCRIPTS

pytestmark = pytest.mark.replaces

Run = Callable[[str], Any]


@contextmanager
def _running_on(where: str) -> Iterator[Run]:
    # Sets would have another order in each process.
    with subprocess.Popen(
        [sys.executable, "-m", "tests.simulated.mpi_scripts", where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(script: str) -> Any:
            process.stdin.write(f"{script}\n")
            process.stdin.flush()
            while (line := process.stdout.readline()) and not line.startswith('{"script"'):
                pass
            return json.loads(line)

        yield run
        process.stdin.close()
        process.wait()


@pytest.fixture(scope="module")
def runs() -> Iterator[tuple[Run, Run]]:
    with _running_on("real") as real, _running_on("model") as model:
        yield real, model


@pytest.mark.parametrize("script", SCRIPTS)
def test_deaths_reach_the_notebook_in_simulation_as_with_open_mpi(
    script: str, runs: tuple[Run, Run]
) -> None:
    real, model = runs
    found = real(script)
    assert "found" in found, found
    assert model(script) == found
