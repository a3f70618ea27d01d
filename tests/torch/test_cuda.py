"""torch's process groups on tensors of CUDA, with stand-ins: a fake cupy and NCCL, and tensors in
host memory that count as tensors of CUDA. Nothing here shows what a GPU does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.notebook import Notebook
from tests.mpi import launch
from tests.torch.conftest import ALL_HERE, notebook
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


STAND_IN = """
import fake_cuda_tensors
fake_cuda_tensors.install()
import torch
import torch.distributed as dist
from torch import nn
"""
#: Not those of gloo alone, nor of memory that ranks share.
PROGRAMS = {
    name: PATTERNS[name]
    for name in (
        "models that share gradients",
        "a static graph",
        "compression hooks",
        "fully sharded",
        "fully sharded by FSDP1",
        "distributed tensors",
        "two dimensions of a mesh",
        "a pipeline",
        "objects",
        "pieces of different sizes",
        "operations and dtypes",
        "calls that are posted",
        "functional collectives",
        "a compiled step",
        "groups of some ranks",
    )
}
ACCELERATOR = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
module = nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    module, torch.optim.SGD(module.parameters(), lr=0.1), DataLoader(data, 8)
)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
accelerator.num_processes, len(loader), same(module)
"""
LIBRARIES = {
    "accelerate": (ACCELERATOR, "(3, 2, True)"),
    "Lightning": (LIGHTNING, "(3, 4, True)"),
    "Fabric": (FABRIC, "(3, 2, True)"),
    "transformers": (TRANSFORMERS, "(3, 3, True)"),
}


def with_fake_gpus(python: str, folder: Path, sharing: int) -> Iterator[Notebook]:
    paths = {"PYTHONPATH": f"{launch.ROOT}:{FAKES}", "ALLRANKS_FAKE_GPU": str(sharing)}
    says = "also with the backends gloo and nccl"
    yield from notebook(folder, python, "allranks", says, **paths)


@pytest.fixture(scope="module")
def with_gpus(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Three ranks with a GPU each, to torch and to allranks."""
    yield from with_fake_gpus(python, tmp_path_factory.mktemp("gpus"), 1)


@pytest.fixture(scope="module")
def with_one_gpu(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Three ranks that share a GPU."""
    yield from with_fake_gpus(python, tmp_path_factory.mktemp("gpu"), 3)


def begin(ranks: Notebook) -> None:
    cell = ranks.on_ranks(f"{STAND_IN}\ndist.is_initialized() or dist.init_process_group('nccl')")
    assert cell.status == "ok", cell.text


@pytest.mark.parametrize("source", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_program_runs_over_nccl(with_gpus: Notebook, source: str):
    begin(with_gpus)
    cell = with_gpus.on_ranks(f"{source}\n'right'", timeout=180)
    assert cell.status == "ok", cell.text
    assert "→ 'right'\n" in cell.text


@pytest.mark.parametrize(("source", "result"), LIBRARIES.values(), ids=LIBRARIES.keys())
def test_libraries_train_over_nccl(with_gpus: Notebook, source: str, result: str):
    begin(with_gpus)
    cell = with_gpus.on_ranks(IMPORTS + source, timeout=180)
    assert f"ranks 0–2 → {result}\n" in cell.text


def test_the_name_of_the_backend_is_the_one_that_was_asked_for(with_gpus: Notebook):
    begin(with_gpus)
    cell = with_gpus.on_ranks(
        "from allranks.features.torch_jax.cuda_group import CudaGroup\n"
        "dist.destroy_process_group()\n"
        "for asked in (None, 'gloo', 'nccl', 'cpu:gloo,cuda:nccl'):\n"
        "    dist.init_process_group(asked)\n"
        "    assert isinstance(dist.group.WORLD, CudaGroup)\n"
        "    print(dist.get_backend())\n"
        "    dist.destroy_process_group()"
    )
    found = cell.text.replace("│", "").split()[2:]
    assert found == ["undefined", "gloo", "nccl", "cpu:gloo,cuda:nccl"]


@pytest.mark.covers("mismatch", "torch on allranks, on GPUs")
def test_a_mismatch_is_named_with_both_lines(with_gpus: Notebook):
    begin(with_gpus)
    cell = with_gpus.on_ranks("dist.all_reduce(torch.ones(4 if rank == 1 else 3))")
    assert "all_reduce(SUM) needs the same shape on every rank: rank 1 has (4,)" in cell.text


@pytest.mark.covers("error", "torch on allranks, on GPUs")
def test_a_rank_that_raises_comes_first(with_gpus: Notebook):
    begin(with_gpus)
    cell = with_gpus.on_ranks(
        "model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))\n"
        "if rank == 1:\n    raise ValueError('no data')\nmodel(torch.ones(1, 3)).sum().backward()"
    )
    assert cell.text.index("ValueError: no data") < cell.text.index("ranks 0, 2 were waiting")
    following = with_gpus.on_ranks("dist.all_reduce(x := torch.ones(1))\nint(x)")
    assert following.text == "ranks 0–2 → 3\n"


@pytest.mark.covers("interrupt", "torch on allranks, on GPUs")
def test_an_interrupt_reaches_a_wait_and_the_groups_stay(with_gpus: Notebook):
    begin(with_gpus)
    cell = with_gpus.start_on_ranks(
        "import time\nprint('here')\nif rank == 0:\n    time.sleep(600)\n"
        "dist.all_reduce(torch.ones(3))"
    ).wait_for(ALL_HERE)
    with_gpus.drain(0.5)
    with_gpus.interrupt()
    ended = cell.wait()
    assert ended.error_name == "CellInterrupted", ended.text
    following = with_gpus.on_ranks("dist.all_reduce(x := torch.ones(1))\nint(x)")
    assert following.text == "ranks 0–2 → 3\n"


@pytest.mark.covers("timing", "torch on allranks, on GPUs")
def test_the_panel_shows_the_times_of_the_calls(with_gpus: Notebook):
    begin(with_gpus)
    source = "for _ in range(3):\n    dist.all_reduce(torch.ones(1000))\ndist.barrier()"
    shown = str(with_gpus.on_ranks(source, "--view full").displays)
    assert "all_reduce In[" in shown


#: Rank 1 leaves a call once the others have launched it.
LEAVES = """
import cupy, tempfile, threading, time
from pathlib import Path
from unittest.mock import patch
from allranks.collectives.gpu.nccl import NcclTransport
from cupy.cuda import _queue

place = Path(broadcast_object(tempfile.mkdtemp()))
stream = cupy.cuda.Stream(non_blocking=True)

def leaves(*_):
    while len(list(place.iterdir())) < size - 1:
        time.sleep(0.01)
    raise ValueError("left")

dist.all_reduce(torch.ones(3))
if rank == 1:
    patch.object(NcclTransport, "_reduce", leaves).start()
try:
    with fake_cuda_tensors.torch_stream(stream):
        dist.all_reduce(torch.ones(3))
        (place / str(rank)).touch()
        {then}
finally:
    patch.stopall()
"""
#: As ``tensor.item()``: the main thread waits in C, and sees neither a signal nor another rank.
IN_CUDA = """
        ended = threading.Event()
        def work():
            event = cupy.cuda.Event()
            event.record(stream)
            while cupy.cuda.runtime.eventQuery(event.ptr):
                time.sleep(0.001)
            ended.set()
        threading.Thread(target=work, daemon=True).start()
        assert ended.wait(60)
"""


@pytest.mark.parametrize("then", ["pass", IN_CUDA.strip()], ids=["ends", "waits in CUDA"])
def test_a_cell_with_a_call_that_the_gpu_can_never_end_fails(with_gpus: Notebook, then: str):
    begin(with_gpus)
    cell = with_gpus.on_ranks(LEAVES.replace("{then}", then), timeout=150)
    assert "ValueError: left" in cell.text
    assert "all_reduce(SUM) needs all of ranks 0–2: rank" in cell.text
    following = with_gpus.on_ranks("dist.all_reduce(x := torch.ones(1))\nint(x)")
    assert following.text == "ranks 0–2 → 3\n"


def test_ranks_that_share_a_gpu_train(with_one_gpu: Notebook):
    begin(with_one_gpu)
    source = PROGRAMS["models that share gradients"]
    cell = with_one_gpu.on_ranks(f"{source}\n'right'", timeout=180)
    assert "→ 'right'\n" in cell.text


@pytest.mark.replaces
@pytest.mark.covers("death", "torch on allranks, on GPUs")
def test_a_rank_that_dies_is_named_and_replaced(with_one_gpu: Notebook):
    begin(with_one_gpu)
    total = "t = torch.ones(1)\ndist.all_reduce(t)\nint(t)"
    assert with_one_gpu.on_ranks(total).text == "ranks 0–2 → 3\n"
    dying = with_one_gpu.on_ranks("import os\nif rank == 1: os._exit(3)\ndist.all_reduce(t)")
    assert "needs all of ranks 0–2: rank 1 ended with exit code 3." in dying.text
    begin(with_one_gpu)
    assert with_one_gpu.on_ranks(total).text == "ranks 0–2 → 3\n"
