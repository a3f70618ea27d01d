"""Ranks pinned to the GPUs of a FAKE pynvml: what each rank sees, and what the notebook says."""

import json
from pathlib import Path

import pytest

from tests.kernel import Kernel

FAKES = Path(__file__).resolve().parents[1] / "fakes"
GPUS = json.dumps([{"uuid": f"GPU-{n}", "used": 2**30, "total": 2**31} for n in range(2)])
SEEN = """%%distributed --view plain{options}
import os
print(device, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUPY_GPU_MEMORY_LIMIT"))
"""
FOR_LIBRARIES = """%%distributed --view plain
names = "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JAX_LOCAL_DEVICE_IDS"
print(local_rank, local_size, *map(os.environ.get, names))
"""
FULL = """%%distributed -r 2 --view plain
class OutOfMemoryError(MemoryError):
    __module__ = "cupy.cuda.memory"

raise OutOfMemoryError("full")
"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    env: dict[str, str | None] = {
        "PYTHONPATH": f"{FAKES.parents[1]}:{FAKES / 'nvml'}:{FAKES / 'gpu'}",
        "ALLRANKS_FAKE_NVML": GPUS,
        "CUDA_VISIBLE_DEVICES": "1,0",
    }
    with Kernel(tmp_path_factory.mktemp("kernel"), env) as kernel:
        kernel.run("%load_ext allranks")
        yield kernel


@pytest.fixture
def kernel(opened):
    yield opened
    opened.run("%distributed stop")


def test_each_rank_is_shown_its_own_gpu(kernel):
    text = kernel.run(SEEN.format(options="")).text
    assert "ranks 0–1 on" in text
    assert "(2 GPUs, " in text
    assert "cuda:0 FAKE GPU (GPU-1) GPU-1 None" in text
    assert "cuda:0 FAKE GPU (GPU-0) GPU-0 None" in text
    assert "share" not in text
    # Scripts for torch take LOCAL_RANK for the number of their GPU, and each sees one: number 0.
    text = kernel.run(FOR_LIBRARIES).text
    assert "0 2 0 1 0" in text
    assert "1 2 0 1 0" in text


def test_shared_gpus_are_said_and_limited(kernel):
    refused = kernel.run("%distributed start -n 3 --exclusive")
    assert refused.error_value.startswith("3 ranks need 3 GPUs, this host has 2.")
    text = kernel.run(SEEN.format(options=" -n 3")).text
    assert "2 ranks share GPU 0; collectives are staged through the host" in text
    assert "cuda:0 FAKE GPU (GPU-1) GPU-1 45%" in text
    assert "cuda:0 FAKE GPU (GPU-0) GPU-0 None" in text
    failed = kernel.run(FULL)
    said = "rank 2 is out of memory on FAKE GPU (GPU-1): 1.0 GiB of 2.0 GiB are in use"
    failed.says(said, "Also using it: rank 0.")


def test_a_dead_rank_is_replaced_on_its_gpu_and_the_others_keep_their_variables(kernel):
    kernel.run("%%distributed -n 3\nkept = 10 * rank")
    died = kernel.run("%%distributed\nimport os\nif rank == 2:\n    os._exit(3)")
    died.says("rank 2 was replaced and has no variables; ranks 0–1 kept theirs")
    text = kernel.run(SEEN.format(options="")).text
    assert "cuda:0 FAKE GPU (GPU-1) GPU-1 45%" in text
    kept = kernel.run("%%distributed --view plain\nprint(globals().get('kept'))").text
    assert all(each in kept for each in ("0", "10", "None"))
    kernel.run(FULL).says("Also using it: rank 0.")  # by the process that rank 0 is now
    kernel.run("%%distributed\nimport os\nif rank == 0:\n    os._exit(3)").says("replaced")
    kernel.run(FULL).says("Also using it: rank 0.")


# In a function: to import the fake is a call of all ranks, so its names must not be saved.
BREAKS = """%%distributed
import numpy as np
mine, kept = np.arange(3) + rank, 10 * rank
class OnGpu:
    def __reduce__(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
lost = OnGpu()
def breaks():
    from cupy.cuda import Event, runtime
    if rank == 1:
        runtime.failing.append("cudaErrorIllegalAddress: an illegal memory access was encountered")
        for _ in range(9):
            Event()
        runtime.eventQuery(0)
breaks()
allreduce(mine, op=Sum)
"""


def test_a_rank_whose_context_is_broken_says_so_once_and_is_replaced_with_its_variables(kernel):
    kernel.run("%distributed start -n 2")
    failed = kernel.run(BREAKS)
    assert "Exception ignored" not in failed.text
    failed.says("rank 1 (", "raised CUDARuntimeError at line 14: runtime.eventQuery(0)")
    failed.says("CUDA refuses every further call of rank 1 (cudaErrorIllegalAddress)")
    failed.says("a new process takes its place, with", "breaks, kept, mine", "any more: lost.")
    failed.says("rank 1 was replaced, with", "rank 0 kept its")
    values = kernel.run("%%distributed\n[*mine.tolist(), kept]")
    values.says("rank 0 → [0, 1, 2, 0]", "rank 1 → [1, 2, 3, 10]")


def test_no_gpus_wanted_are_none_seen(kernel):
    text = kernel.run(SEEN.format(options=" -n 2 --gpus none")).text
    assert "(CPU, " in text
    assert "1 2 1 2 None" in kernel.run(FOR_LIBRARIES).text
    assert "cpu -1 None" in text
