"""torch's process groups on tensors of CUDA, with stand-ins: a fake cupy and NCCL, and tensors in host
memory that count as tensors of CUDA. Nothing here shows what a GPU does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.notebook import Notebook
from tests.mpi import launch
from tests.torch.conftest import ENVIRONMENT
from tests.torch.test_libraries import FABRIC, IMPORTS, LIGHTNING, TRANSFORMERS
from tests.torch.test_patterns import PATTERNS

FAKES = str(launch.ROOT / "tests" / "fakes" / "gpu")
RUN = str(launch.ROOT / "tests" / "mpi" / "run.py")


@pytest.mark.parametrize(("size", "sharing"), [(2, 1), (3, 1), (3, 3)])
def test_calls_on_tensors_of_cuda(python: str, size: int, sharing: int):
    ended = launch.mpiexec(
        size, RUN, "cuda_tensors", "--tb=short",
        python=python, timeout=250, PYTHONPATH=f"{launch.ROOT}:{FAKES}",
        ALLRANKS_FAKE_GPU=str(sharing),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert " passed" in ended.stdout
