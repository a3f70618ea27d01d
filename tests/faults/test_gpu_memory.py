"""Ranks that share memory on a FAKE GPU, one of which dies; on a real one: tests/gpu/cells.py."""

import json
import re
from pathlib import Path

import pytest

from tests.gpu import cells

REPOSITORY = Path(__file__).resolve().parents[2]
FAKES = REPOSITORY / "tests" / "fakes"
ENVIRONMENT = {
    "PYTHONPATH": f"{REPOSITORY}:{FAKES / 'nvml'}:{FAKES / 'gpu'}",
    "ALLRANKS_FAKE_NVML": json.dumps([{"uuid": "GPU-0", "used": 2**30, "total": 2**34}]),
    "ALLRANKS_FAKE_GPU": "64",
    "ALLRANKS_FAKE_NCCL": "no",
}
"""All ranks share one GPU."""


@pytest.mark.parametrize("size", [2, 4])
def test_the_others_live_on_when_a_rank_whose_window_they_have_open_dies(new_notebook, size):
    notebook = new_notebook(env=ENVIRONMENT)
    assert notebook.run(f"%distributed start -n {size}", 60).status == "ok"
    steps = cells.Steps(notebook)
    cells.ipc_deaths(steps, size, [1000, 1_500_000])
    assert steps.wrong == []
    if size == 4:
        page = (REPOSITORY / "docs" / "gpu.md").read_text()
        (cell,) = re.findall(r"gpu_memory\.py -->\n```python\n(.*?)```", page, re.DOTALL)
        compared = notebook.run(cell.replace("1 << 22, 1 << 24, 1 << 26", "1 << 19"), 120)
        compared.says(
            "4,096 B  staged ", "1,048,576 B  staged ", "2,097,152 B  staged ", "ms  ipc "
        )
