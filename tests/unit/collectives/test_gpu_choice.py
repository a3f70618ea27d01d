"""Where arrays go and by which transport, and what is said where something is missing."""

import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from allranks.collectives.arrays.reductions import ReduceOp
from allranks.collectives.gpu import cupy_api
from allranks.collectives.gpu.nccl import nccl_form
from allranks.collectives.gpu.transport import (
    Placement,
    RankDevice,
    choose,
    read_placement,
    uuid_text,
)
from allranks.errors import MissingDependency, UsageError

FAKE = str(Path(__file__).resolve().parents[2] / "fakes" / "gpu")
ONE = RankDevice(0, "0000:01:00.0", "GPU-1", 22703)
TWO = RankDevice(0, "0000:02:00.0", "GPU-2", 22703)


def test_a_gpu_for_each_rank_is_nccl_and_a_shared_one_is_staged_unless_it_is_asked_for():
    assert choose("", (0, 1), [ONE, TWO]) == "nccl"
    assert choose("", (0, 1), [ONE, ONE._replace(host=1)]) == "nccl"
    assert choose("", (3,), [ONE]) == "nccl"
    assert choose("", (0, 1), [ONE, ONE]) == "staged"
    assert choose("staged", (0, 1), [ONE, TWO]) == "staged"
    shared = [ONE._replace(nccl=23002, shares=True)] * 2
    assert choose("nccl", [0, 1], shared) == "nccl"
    assert choose("", [0, 1], shared) == "staged"
    with pytest.raises(UsageError, match="NCCL_MULTI_RANK_GPU_ENABLE=1 on every rank"):
        choose("nccl", [0, 1], [ONE, ONE])


def test_nccl_that_cannot_be_says_why_and_slices_of_one_gpu_are_one_to_it():
    slices = [ONE._replace(uuid="MIG-1"), ONE._replace(uuid="MIG-2")]
    assert choose("", (0, 1), slices) == "staged"
    with pytest.raises(UsageError, match="ranks 0–1 share slices of one GPU"):
        choose("nccl", (0, 1), slices)
    with pytest.raises(UsageError, match=r"ranks 2, 5 share one GPU \(GPU-1\)\. Leave transport="):
        choose("nccl", (2, 3, 5), [ONE, TWO, ONE])
    without = TWO._replace(nccl=0, why="pip install it")
    assert choose("", (0, 1), [ONE, without]) == "staged"
    with pytest.raises(UsageError, match=r"rank 1 has none \(pip install it\)"):
        choose("nccl", (0, 1), [ONE, without])
    with pytest.raises(UsageError, match="versions differ: 22703, 23004"):
        choose("nccl", (0, 1), [ONE, TWO._replace(nccl=23004)])


def test_memory_on_a_gpu_is_shared_by_ranks_of_one_gpu_and_only_if_it_is_asked_for():
    assert choose("ipc", (0, 1), [ONE, ONE]) == "ipc"
    assert choose("ipc", (3,), [ONE]) == "ipc"
    # Whether slices share memory is for CUDA to say: if they do not, the arrays are staged.
    assert choose("ipc", (0, 1), [ONE._replace(uuid="MIG-1"), ONE._replace(uuid="MIG-2")]) == "ipc"
    for others in ([ONE, TWO, ONE], [ONE, ONE._replace(host=1), ONE]):
        with pytest.raises(UsageError, match=r"one GPU: ranks 0, 2 and rank 1 use different ones"):
            choose("ipc", (0, 1, 2), others)


def test_a_uuid_reads_as_the_drivers():
    raw = bytes.fromhex("0123456789abcdef0123456789abcdef")
    assert uuid_text(raw) == "GPU-01234567-89ab-cdef-0123-456789abcdef"
    assert uuid_text(b"") == ""


@pytest.mark.parametrize("device", ["/cpu:0", "/CPU:0", "cpu", "/device:CPU:0", "CPU:1"])
def test_a_device_is_read_as_tensorflow_writes_it(device):
    assert read_placement("allreduce", None, device) == Placement("cpu", "")


def test_a_transport_between_hosts_takes_arrays_through_the_host():
    assert read_placement("allreduce", "mpi", "") == Placement("cpu", "mpi")
    assert read_placement("allreduce", "staged", "/gpu:0") == Placement("gpu", "staged")


def test_every_dtype_has_its_way_over_the_wire():
    integers = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    for op in (ReduceOp.Average, ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product):
        for name in integers:
            assert nccl_form(op, np.dtype(name)) is not None
        for name in ("float32", "float64"):
            ordered = op in (ReduceOp.Min, ReduceOp.Max)
            assert (nccl_form(op, np.dtype(name)) is None) == ordered
    assert nccl_form(ReduceOp.Sum, np.dtype("float16")) is None
    assert nccl_form(ReduceOp.Product, np.dtype("complex64")) is None
    found = nccl_form(ReduceOp.Sum, np.dtype("complex128"))
    assert found is not None
    assert found.view(np.zeros(3, "complex128")).shape == (6,)


def run(code: str, **more: str) -> str:
    # Open MPI leaves a file of a process that is the only one, where that may share memory.
    environment = {**os.environ, "OMPI_MCA_btl": "self", **more}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


PREFACE = "import numpy as np; from allranks.collectives import loopback as l\n"
PREFACE += "import allranks.collectives as c\n"
TRY = "try: l.run(1, lambda: {})\nexcept Exception as e: print(type(e).__name__, e)"


@pytest.mark.skipif(util.find_spec("cupy") is not None, reason="the package cupy is here")
def test_without_cupy_a_gpus_path_says_how_to_get_it():
    for call in ("c.allreduce(np.ones(2), device='/gpu:0')", "c.scatter(None, device='/gpu:0')"):
        said = run(PREFACE + TRY.format(call))
        assert said.startswith("MissingDependency arrays on a GPU need the package cupy")
        assert "pip install 'allranks[cuda12]'" in said


def test_a_cupy_that_is_too_old_and_a_missing_nccl_are_named(monkeypatch):
    old = ModuleType("cupy")
    monkeypatch.setattr(old, "__version__", "13.6.0", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", old)
    with pytest.raises(MissingDependency, match=r"cupy 14 or newer .*found 13\.6\.0\. pip install"):
        cupy_api.installed()
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    nccl = ModuleType("cupy.cuda.nccl")
    nccl.available = False
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
    with pytest.raises(MissingDependency, match=r"libnccl\.so\.2.*pip install nvidia-nccl-cu12"):
        cupy_api.load_nccl()


def asked_for_a_gpu(**more: str) -> str:
    """What is said of it; without one, numbers of host memory are reduced as ever."""
    assert run(PREFACE + "print(l.run(1, lambda: c.allreduce(2.0)))", **more).strip() == "[2.0]"
    return run(PREFACE + TRY.format("c.allreduce(np.ones(2), device='/gpu:0')"), **more)


@pytest.mark.parametrize(
    ("missing", "needs"),
    [
        ("no driver", "NVIDIA's driver, and CUDA says cudaErrorInsufficientDriver"),
        ("no GPU", "one that this process may see: CUDA says cudaErrorNoDevice"),
    ],
)
def test_what_a_fake_cupy_lacks_is_said(missing, needs):
    path = os.pathsep.join(filter(None, [FAKE, os.environ.get("PYTHONPATH")]))
    said = asked_for_a_gpu(PYTHONPATH=path, ALLRANKS_FAKE_GPU=missing)
    assert said.startswith(f"MissingDependency arrays on a GPU need {needs}")
    assert "nvidia-smi" in said
