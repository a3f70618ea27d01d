"""Ranks that share memory on a FAKE GPU, one of which dies; on a real one: tests/gpu/cells.py."""

import json
from pathlib import Path

import pytest

from tests.gpu import cells

FAKES = Path(__file__).resolve().parents[1] / "fakes"
ENVIRONMENT = {
    "PYTHONPATH": f"{FAKES.parents[1]}:{FAKES / 'nvml'}:{FAKES / 'gpu'}",
    "ALLRANKS_FAKE_NVML": json.dumps([{"uuid": "GPU-0", "used": 2**30, "total": 2**34}]),
    "ALLRANKS_FAKE_GPU": "64",
}
"""All ranks share one GPU."""


@pytest.mark.parametrize("size", [2, 4])
def test_the_others_live_on_when_a_rank_whose_window_they_have_open_dies(new_notebook, size):
    notebook = new_notebook(env=ENVIRONMENT)
    assert notebook.run(f"%distributed start -n {size}", 60).status == "ok"
    steps = cells.Steps(notebook)
    cells.ipc_deaths(steps, size, [1000, 1_500_000])
    assert steps.wrong == []
