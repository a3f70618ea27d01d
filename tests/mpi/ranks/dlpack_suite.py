"""Arrays of each library that are on a GPU: no copy on the way in, the same kind on the way back.

Needs a GPU. A library that is missing, or that sees no GPU, is skipped and named.
"""

from __future__ import annotations

import os
from typing import Any

import libraries
import numpy as np
import pytest
from gpus import cupy, needs_a_gpu
from libraries import equal, results, total, values

import allranks.collectives as c
from allranks.collectives.gpu import dlpack

# Read when the libraries are imported: all of them share this rank's GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

needs_a_gpu("other libraries know nothing of the fake")

COMMON = ["int32", "float32", "float64", "float16", "bfloat16"]


def no_gpu(name: str) -> Any:
    return pytest.skip(f"{name} sees no GPU: install the build for CUDA")


class Cupy(libraries.Kind):
    dtypes = (*COMMON, "int16", "bool", "complex64")

    def make(self, array: np.ndarray) -> Any:
        return cupy.asarray(array)

    def back(self, found: Any) -> np.ndarray:
        return cupy.asnumpy(found)

    def pointer(self, found: Any) -> int:
        return int(found.data.ptr)


class Torch(libraries.Torch):
    dtypes = Cupy.dtypes

    def __init__(self) -> None:
        super().__init__()
        if not self.library.cuda.is_available():
            no_gpu("torch")

    def make(self, array: np.ndarray) -> Any:
        return super().make(array).cuda()

    def back(self, found: Any) -> np.ndarray:
        return super().back(found.cpu())

    def pointer(self, found: Any) -> int:
        return int(found.data_ptr())


class Jax(libraries.Jax):
    def __init__(self) -> None:
        super().__init__()
        if self.library.default_backend() != "gpu":
            no_gpu("jax")

    def pointer(self, found: Any) -> int:
        return int(found.unsafe_buffer_pointer())


class TensorFlow(libraries.TensorFlow):
    # int32 of a GPU lives in host memory there: int64 instead.
    dtypes = ("int64", "float32", "float64", "float16", "bfloat16", "bool")

    def __init__(self) -> None:
        super().__init__()
        if not self.library.config.list_physical_devices("GPU"):
            no_gpu("tensorflow")

    def make(self, array: np.ndarray) -> Any:
        with self.library.device("/GPU:0"):
            return self.library.identity(super().make(array))

    def pointer(self, found: Any) -> int:
        capsule = self.library.experimental.dlpack.to_dlpack(found)
        return int(cupy.from_dlpack(capsule).data.ptr)


KINDS = [Cupy, Torch, Jax, TensorFlow]
CASES = [(kind, dtype) for kind in KINDS for dtype in kind.dtypes]


@pytest.fixture(params=CASES, ids=[f"{kind.__name__}-{dtype}" for kind, dtype in CASES])
def case(request) -> tuple[Any, str]:
    make_kind, name = request.param
    return make_kind(), name


def test_every_operation_gives_the_kind_back(case):
    kind, name = case
    brought = values(c.rank(), (2 * c.size(), 3), name)
    mine, other = kind.make(brought), kind.make(values(c.rank(), (c.rank() + 1, 3), name))
    for found, wanted in results(mine, other, name):
        kind.check(found, mine)
        equal(kind.back(found), wanted)
    equal(kind.back(mine), brought)


def test_nothing_is_copied_on_the_way_in(case):
    kind, name = case
    if kind.__class__ is TensorFlow and name == "bool":
        pytest.skip("TensorFlow's bool is not carried by DLPack: it goes through the host")
    mine = kind.make(values(c.rank(), (64, 64), name))
    assert dlpack.is_on_gpu(mine)
    source, _ = dlpack.to_cupy(mine)
    assert source.data.ptr == kind.pointer(mine)


def test_results_are_used_at_once_and_freed(case):
    """Memory that a library gives back while its kernels still run must not be written to."""
    kind, name = case
    if name not in ("float32", "float64"):
        pytest.skip("one dtype is enough here")
    mine = kind.make(np.ones((512, 512), name))
    for _ in range(50):
        found = c.allreduce(mine, c.Sum)
        doubled = found + found
        del found
        c.allreduce(kind.make(np.full((512, 512), 7, name)), c.Sum)
        assert (kind.back(doubled) == 2 * c.size()).all()


@pytest.mark.parametrize("graph", [False, True])
def test_horovods_operations_leave_tensors_on_the_gpu(graph):
    library = TensorFlow().library
    import allranks.tensorflow as hvd

    mine = TensorFlow().make(values(c.rank(), (64, 32), "float32"))
    for device, transports in (("", ("nccl", "staged")), ("/cpu:0", ("mpi", "shared"))):

        def reduced(device: str = device) -> Any:
            return hvd.allreduce(mine, op=hvd.Sum, device_dense=device)

        found = library.function(reduced)() if graph else reduced()
        equal(found.numpy(), total((64, 32), "float32"))
        assert "GPU" in found.backing_device
        assert c.size() == 1 or c.records()[-1].transport in transports


def test_sparse_and_strings_are_refused_as_in_host_memory():
    library = TensorFlow().library
    with pytest.raises(TypeError, match="numbers or bool"):
        c.allreduce(library.constant(["a"]))
