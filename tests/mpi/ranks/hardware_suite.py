"""What only a GPU can show: other libraries' streams, sizes over 2³¹, forks, memory given back."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gpus import cupy, needs_a_gpu
from libraries import package

import allranks.collectives as c
from allranks.features.gpu import memory as gpu_memory

needs_a_gpu("needs a GPU, and this cupy is the fake")

GIB = 1 << 30
COUNT = 1 << 22


def free() -> int:
    return int(cupy.cuda.runtime.memGetInfo()[0])


def test_a_result_of_torch_may_be_read_on_a_side_stream():
    torch = package("torch", "torch, built for CUDA")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU: install the build for CUDA")
    side = torch.cuda.Stream()
    mine = torch.ones(COUNT, device="cuda")
    for _ in range(20):
        found = c.allreduce(mine, c.Sum)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            read = found * 1.0
        del found
        for _ in range(3):
            c.allreduce(mine * 7, c.Sum)
        side.synchronize()
        assert bool((read == c.size()).all())


def test_a_result_of_jax_may_be_read_by_what_was_compiled():
    jax = package("jax", "jax, built for CUDA")
    if jax.default_backend() != "gpu":
        pytest.skip("jax sees no GPU: install the build for CUDA")

    @jax.jit
    def slow(x: Any) -> Any:
        return jax.lax.fori_loop(0, 200, lambda i, y: y * 1.0 + 0.0, x)

    mine = jax.numpy.ones(COUNT, "float32")
    for _ in range(20):
        found = c.allreduce(mine, c.Sum)
        read = slow(found)
        del found
        for _ in range(3):
            c.allreduce(mine * 7, c.Sum)
        assert (np.asarray(read) == c.size()).all()


@pytest.mark.parametrize("transport", [None, "staged"])
def test_arrays_may_have_more_than_two_to_the_31_elements(transport):
    count = (1 << 31) + 11
    needed = 8 * GIB
    if min(c.allgather(np.array([free()]))) < needed * c.size():
        pytest.skip(f"takes {needed // GIB} GiB of the GPU's memory a rank")
    mine = cupy.ones(count, np.int8)
    mine[-1] = 5
    found = c.allreduce(mine, c.Sum, transport=transport)
    assert found.shape == (count,)
    assert found[-2:].get().tolist() == [c.size(), 5 * c.size()]
    assert int(found[(1 << 31) - 3]) == c.size()
    del mine, found
    cupy.get_default_memory_pool().free_all_blocks()


FORKS = """
import os
import cupy
from allranks.engine import libraries
assert not libraries.is_cuda_open(), "importing cupy opens CUDA"
child = os.fork()
if not child:
    os._exit(0 if int(cupy.ones(3).sum()) == 3 and libraries.is_cuda_open() else 1)
assert os.waitpid(child, 0)[1] == 0, "a fork cannot use the GPU"
cupy.ones(3)
assert libraries.is_cuda_open(), "CUDA is open, and nobody saw"
"""


def test_what_is_forked_uses_the_gpu_if_nothing_was_opened_before():
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout


def test_memory_of_a_failed_cell_is_given_back():
    c.allreduce(cupy.ones(4, np.float32))
    cupy.get_default_memory_pool().free_all_blocks()
    gc.collect()
    before = free()

    def fails() -> None:
        held = cupy.ones(GIB // 4, np.float32)
        c.allreduce(held, c.Sum)
        raise ValueError("after the call")

    try:
        fails()
    except ValueError as error:
        gpu_memory.release(error)
    # Other ranks may be on the same GPU: what they hold meanwhile is not this one's.
    c.barrier()
    assert free() > before - GIB // 2
