"""torch's own tests of torch.distributed, which its wheel contains, on groups of allranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.mpi.launch import mpiexec

RANKS = 3
#: Tests of gloo itself, with the reason why they are not compared.
OF_GLOO: dict[str, str] = {}
#: Of torch 2.13; other versions have about as many.
LEAST = 85


@pytest.mark.timeout(1500)
def test_torchs_own_tests_pass(python: str, tmp_path: Path):
    program = os.path.join("tests", "torch", "ranks", "torch_suite.py")
    done = mpiexec(
        RANKS, program, "allranks", str(tmp_path),
        python=python, timeout=1400, CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    outcomes = [json.loads((tmp_path / f"outcomes.{rank}").read_text()) for rank in range(RANKS)]
    failed = {
        name: told
        for name in outcomes[0]
        for told, _ in (outcome[name] for outcome in outcomes)
        if told.startswith("failed") and name not in OF_GLOO
    }
    assert failed == {}
    assert sum(told == "passed" for told, _ in outcomes[0].values()) >= LEAST
