"""Ranks that share memory on a FAKE GPU, one of which dies; on a real one: tests/gpu/cells.py."""

import json
import re
from pathlib import Path

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


class Steps(cells.Steps):
    """Those of a machine that may be slow."""

    def interrupt(self, name, source, begun, seconds=60):
        super().interrupt(name, source, begun, seconds)


def test_ranks_whose_windows_others_have_open_die_and_the_others_live_on(new_notebook):
    notebook = new_notebook(env=ENVIRONMENT)
    steps = Steps(notebook)
    cells.ipc(steps, [1000, 1_500_000])
    assert not steps.wrong, "\n".join(steps.wrong)
    # On the four ranks that it leaves.
    page = (REPOSITORY / "docs" / "gpu.md").read_text()
    (cell,) = re.findall(r"gpu_memory\.py -->\n```python\n(.*?)```", page, re.DOTALL)
    compared = notebook.run(cell.replace("1 << 22, 1 << 24, 1 << 26", "1 << 19"), 120)
    compared.says("4,096 B  staged ", "1,048,576 B  staged ", "2,097,152 B  staged ", "ms  ipc ")
