"""What pins a rank to its GPU, what is told of that GPU, and who is on it when memory runs out."""

import os
import sys
from types import SimpleNamespace

import pytest

from allranks import launched
from allranks.engine import libraries
from allranks.errors import RankLeft, TransportFailed
from allranks.features.gpu.broken import broken_by, mute_finalizers
from allranks.features.gpu.memory import GpuUse, PinnedGpu, is_out_of_memory, release

GIB = 2**30


@pytest.fixture
def nvml(driver):
    return lambda **gpu: driver([{"uuid": "GPU-1", "slices": ["MIG-1"], **gpu}])


def test_ranks_on_one_gpu_get_their_share_of_its_memory_and_a_users_own_limits_stay():
    alone = libraries.pinning(("GPU-a",), 0, 1)[1]
    assert "CUPY_GPU_MEMORY_LIMIT" not in alone
    assert alone["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    shared = libraries.pinning(("GPU-a",), 1, 3)[1]
    assert shared["CUPY_GPU_MEMORY_LIMIT"] == "30%"
    assert shared["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert shared["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.30"
    environment = {"CUPY_GPU_MEMORY_LIMIT": "10%", "CUDA_VISIBLE_DEVICES": "0,1"}
    libraries.set_variables(environment, libraries.pinning(("GPU-a",), 0, 2)[1])
    assert environment["CUPY_GPU_MEMORY_LIMIT"] == "10%"
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a"


def test_a_rank_of_its_host_is_found_by_a_launchers_variables_or_its_own_number():
    of_two_hosts = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    assert launched.local_place(of_two_hosts, 5, 8) == (1, 4)
    own = launched.RankVariables(("FLUX_RANK",), "FLUX_SIZE", "FLUX_LOCAL", "FLUX_LOCAL_SIZE")
    environment = {"FLUX_RANK": "5", "FLUX_LOCAL": "1", "FLUX_LOCAL_SIZE": "4", "PMI_RANK": "0"}
    assert launched.rank(environment, [own]) == 5
    assert launched.local_place(environment, 5, 8, [own]) == (1, 4)
    oversubscribed = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    assert launched.local_place(oversubscribed, 2, 3) == (2, 3)
    assert launched.local_place({}, 5, 8) == (5, 8)


def test_a_gpus_use_is_what_the_driver_tells_and_nothing_without_one(nvml, monkeypatch):
    nvml(used=3 * GIB, total=140 * GIB)
    assert PinnedGpu("GPU-1").use() == GpuUse(3 * GIB, 140 * GIB, 87, 54)
    # A slice has memory of its own, and the thermometer is the whole GPU's.
    assert PinnedGpu("MIG-1").use() == GpuUse(3 * GIB, 140 * GIB, -1, 54)
    # Of two processes on it, this one has 1 GiB.
    nvml(used=3 * GIB, total=140 * GIB, processes=[[os.getpid(), GIB], [2**22 + 1, 2 * GIB]])
    assert PinnedGpu("GPU-1").use().own_nbytes == GIB
    nvml()
    assert PinnedGpu("").use() == GpuUse()
    assert PinnedGpu("GPU-gone").use() == GpuUse()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert PinnedGpu("GPU-1").use() == GpuUse()


def test_running_out_of_memory_names_rank_gpu_and_who_else_is_there(nvml):
    mine, other, unknown = 11, os.getpid(), 2**22 + 1
    nvml(
        used=139 * GIB,
        total=140 * GIB,
        processes=[[mine, 60 * GIB], [12, 70 * GIB], [other, GIB], [unknown, 0]],
    )
    said = PinnedGpu("GPU-1").out_of_memory(2, mine, {12: 0, 13: 4})
    assert said.startswith(
        "rank 2 is out of memory on FAKE GPU (GPU-1): 139.0 GiB of 140.0 GiB are in use. "
        "Also using it: rank 0 (70.0 GiB), "
    )
    assert f"pid {other} (1.0 GiB), pid {unknown}, rank 4." in said


@pytest.mark.parametrize(
    ("module", "name", "text", "found"),
    [
        ("cupy_backends.cuda.api.runtime", "CUDARuntimeError", "cudaErrorIllegalAddress: an", 1),
        ("cupy_backends.cuda.api.driver", "CUDADriverError", "CUDA_ERROR_LAUNCH_FAILED: un", 1),
        ("torch", "AcceleratorError", "CUDA error: uncorrectable ECC error encountered", 1),
        ("builtins", "RuntimeError", "CUDA error: device-side assert triggered", 1),
        ("jaxlib", "JaxRuntimeError", "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal", 1),
        ("cupy_backends.cuda.api.runtime", "CUDARuntimeError", "cudaErrorInvalidValue: in", 0),
        ("cupy_backends.cuda.api.runtime", "CUDARuntimeError", "cudaErrorMemoryAllocation", 0),
        ("__main__", "Own", "cudaErrorIllegalAddress", 0),
    ],
)
def test_errors_that_break_the_context_are_known(module, name, text, found):
    kind = RuntimeError if module == "builtins" else type(name, (RuntimeError,), {})
    if kind is not RuntimeError:
        kind.__module__ = module
    assert bool(broken_by(kind(text))) == bool(found)


def test_ranks_that_waited_for_a_rank_with_a_broken_context_are_not_broken():
    why = "a collective needs a GPU that works, and CUDA says cudaErrorIllegalAddress: an illegal"
    assert broken_by(TransportFailed(why)) == "cudaErrorIllegalAddress"
    assert not broken_by(RankLeft(f"allreduce needs all of ranks 0–1: rank 1 has left ({why})"))


def test_finalizers_of_a_broken_context_print_nothing(monkeypatch):
    printed, found = [], []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    mute_finalizers(found.append)
    error = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api"})

    class Freed:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    Freed(error("cudaErrorIllegalAddress: an illegal memory access was encountered"))
    assert (printed, found) == ([], ["cudaErrorIllegalAddress"])
    Freed(ValueError("another"))
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("error", "works", "emptied"),
    [(KeyboardInterrupt(), True, 0), (KeyboardInterrupt(), False, 1), (ValueError(), True, 1)],
)
def test_an_interrupted_cell_ends_before_the_work_of_its_gpu(monkeypatch, error, works, emptied):
    """To give memory back waits for the whole GPU: cudaFree."""
    given = []
    pool = SimpleNamespace(free_all_blocks=lambda: given.append(1))
    stream = SimpleNamespace(done=not works)
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(get_current_stream=lambda: stream),
        is_available=lambda: True,
        get_default_memory_pool=lambda: pool,
        get_default_pinned_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    release(error)
    assert len(given) == emptied


def test_a_device_has_its_gpus_name_and_the_uuid_where_a_host_has_several(nvml, driver):
    nvml()
    assert libraries.pinning(("GPU-1",), 0, 4)[0] == "cuda:0 FAKE GPU"
    ids = ("GPU-56c821b0-32e5", "GPU-11c821b0-32e5", "GPU-11c821b0-32e6")
    driver([{"uuid": uuid} for uuid in ids])
    assert libraries.pinning(ids[:2], 0, 2)[0] == "cuda:0 FAKE GPU (GPU-56c821b0)"
    assert libraries.pinning(ids, 1, 3)[0] == "cuda:0 FAKE GPU (GPU-11c821b0-32e5)"
    assert libraries.pinning(("GPU-unknown",), 0, 1)[0] == "cuda:0 (GPU-unknown)"


def test_every_librarys_out_of_memory_is_known():
    def of(module: str, name: str, text: str = "") -> BaseException:
        return type(name, (RuntimeError,), {"__module__": module})(text)

    assert is_out_of_memory(of("cupy.cuda.memory", "OutOfMemoryError"))
    assert is_out_of_memory(of("torch", "OutOfMemoryError"))
    assert is_out_of_memory(of("tensorflow.python.framework.errors_impl", "ResourceExhaustedError"))
    assert is_out_of_memory(of("jaxlib", "XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory"))
    assert not is_out_of_memory(of("jaxlib", "XlaRuntimeError", "INTERNAL: failed"))
    assert not is_out_of_memory(MemoryError())
