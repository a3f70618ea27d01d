"""Cells of two ranks that share a GPU, or have one each: what ends them, and what the next one has.

    python tests/gpu/cells.py [NAME ...]

A name is that of a notebook below: ends, arrays, nccl, torch, …; without one all of them run. Its
Python needs what the notebook imports, and what a notebook needs. Each step shows its seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from tests.faults.notebook import Notebook  # noqa: E402  the folder is found above
from tests.kernel import Cell  # noqa: E402

INTERRUPTED_SECONDS = 1.0
BEGIN = """
import os
import cupy
import numpy as np
kept, mine = 10 * rank, cupy.full(1 << 20, rank + 1.0, "float32")
print(device, float(allreduce(mine, Sum)[0]))
"""
NEXT = "print('next', float(allreduce(cupy.ones(3), Sum)[0]), globals().get('kept'))"
DIES = "if rank == 1:\n    os._exit(3)\nallreduce(mine, Sum)"
# A write to an address that no array has.
BREAKS = """
source = 'extern "C" __global__ void f(int *at) { at[threadIdx.x] = 1; }'
if rank == 1:
    cupy.RawKernel(source, "f")((1,), (1,), (np.uint64(8),))
    cupy.cuda.runtime.deviceSynchronize()
allreduce(mine, Sum)
"""
# About ten seconds of work before the call.
BUSY = """
spins = 'extern "C" __global__ void g(long long n)'
spins += '{ long long t = clock64(); while (clock64() - t < n); }'
cupy.RawKernel(spins, "g")((1,), (1,), (np.int64(15_000_000_000),))
print("works")
allreduce(mine, Sum)
"""

# Results must be right, and on the GPU, in every dtype.
DTYPES = """
for dtype in ("float16", "float32", "float64", "int32", "complex64"):
    these = cupy.asarray(np.arange(1000) % 50).astype(dtype)
    added = allreduce(these, Sum)
    assert isinstance(added, cupy.ndarray) and added.dtype == dtype, dtype
    assert bool((added == 2 * these).all()), dtype
print("every dtype")
"""
DIFFERS = "allreduce(cupy.ones(3 + rank), Sum)"
ON_HOST = "allreduce(cupy.ones(3) if rank == 0 else np.ones(3), Sum)"
RAISES = "if rank == 1:\n    raise ValueError('no batch')\n"
WAITS = "print('waits')\nif rank == 1:\n    import time\n    time.sleep(600)\n"
ALIVE = "print('alive', rank)"
KEEPS = "mine = cupy.full(10, rank + 1.5)\nkeep('mine')"
NCCL = """
import cupy
result = allreduce(cupy.full(1 << 20, rank + 1.0), Sum, transport="nccl")
print("over nccl", float(result[0]))
"""
SUMMED_BY_IPC = "allreduce(mine, Sum, transport='ipc')"
OVER_NCCL = "allreduce(cupy.ones(1 << 20), Sum, transport='nccl')"
# A rank dies while a call of the other has been launched.
DIES_AMID = f"""
import os
for call in range(100):
    if (rank, call) == (1, 50):
        os._exit(3)
    {OVER_NCCL}
"""
# With what the fake cupy has too.
BY_IPC = """
import cupy
import numpy as np
from allranks.collectives import records
for count in (1000, 1 << 20):
    mine = cupy.asarray(np.full(count, rank + 1.0, "float32"))
    added = cupy.asnumpy(allreduce(mine, Sum, transport="ipc"))
    assert (added == size * (size + 1) / 2).all()
print(records()[-1].transport, "right", rank + 1.0)
"""
# A rank dies in a call by ipc, and the others in it have this rank's window open. As the owner it
# dies when the others may begin to read its window, as a reader when its GPU has begun to.
DIES_BY_IPC = """
import os
from allranks.collectives.gpu.ipc import IpcTransport
if rank == WHO:
    def read(self, call, work, begins=IpcTransport._read, calls=[]):
        calls.append(call)
        if len(calls) > 20:
            if WHEN == "reader":
                with self.device.on(self.device.collectives):
                    work and work()
            os._exit(3)
        return begins(self, call, work)
    IpcTransport._read = read
kept = cupy.asarray(np.full(COUNT, rank + 1.0, "float32"))
for _ in range(100):
    allreduce(kept, Sum, transport="ipc")
"""
# The others' arrays are as they were, and their GPU computes.
KEPT_BY_IPC = "if 'kept' in globals():\n    print('computes', cupy.asnumpy(kept * 2.0)[-1])"
TENSORS = """
import torch
tensor = torch.full((2, 3), rank + 1.0, device="cuda", dtype=torch.bfloat16)
added = allreduce(tensor, Sum)
print(added.device, added.dtype, added[0, 0].item(), tuple(allgather(tensor).shape))
"""
FILLS = """
import torch
half = int(torch.cuda.mem_get_info()[1] * 0.6)
barrier()
if rank == 0:
    big = torch.empty(half, dtype=torch.uint8, device="cuda")
barrier()
if rank == 1:
    big = torch.empty(half, dtype=torch.uint8, device="cuda")
allreduce(torch.ones(3, device="cuda"), Sum)
"""
EMPTIES = "print('big' in globals())\nbig = None\ntorch.cuda.empty_cache()"
JAX = """
import jax
import jax.numpy as jnp
added = allreduce(jnp.arange(4.0) + rank, Sum)
print(jax.default_backend(), next(iter(added.devices())).platform, float(added[3]))
"""
DDP = """
import torch
import torch.distributed as dist
from torch import nn
dist.is_initialized() or dist.init_process_group()
torch.manual_seed(rank)
net = nn.Linear(16, 1).cuda()
model = nn.parallel.DistributedDataParallel(net, device_ids=[0])
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
batch = torch.randn(64, 16, device="cuda")
for step in range(20):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
    optimizer.step()
print("equal weights", torch.equal(broadcast(net.weight.detach(), 0), net.weight))
"""
BACKWARD = "model(batch).sum().backward()\ntorch.cuda.synchronize()"
KERAS = """
import os
os.environ["KERAS_BACKEND"] = "BACKEND"
import keras
import numpy as np
import allranks.keras as hvd
keras.utils.set_random_seed(rank)
x = np.random.default_rng(rank).normal(size=(256, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
begin = hvd.BroadcastGlobalVariables(0)
model.fit(x, x.sum(1, keepdims=True), epochs=2, verbose=0, callbacks=[begin])
kernels = allgather_object(model.get_weights()[0])
print(keras.backend.backend(), "equal weights", np.array_equal(*kernels))
"""
LIGHTNING = """
import lightning
import torch
from torch import nn

class Sums(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.layer(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = lightning.Trainer(
    accelerator="gpu", devices=1, num_nodes=size, strategy="ddp", max_epochs=1, **quiet
)
sums = Sums()
trainer.fit(sums, torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8))
weight = sums.layer.weight.detach().cuda()
print("processes", trainer.world_size, torch.equal(broadcast(weight, 0), weight))
"""
ACCELERATE = """
import torch.distributed as dist
from accelerate import Accelerator
dist.is_initialized() and dist.destroy_process_group()
accelerator = Accelerator()
print("processes", accelerator.num_processes, accelerator.device.type)
"""
SHARDED = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.is_initialized() or dist.init_process_group()
sharded = fully_shard(nn.Linear(16, 2).cuda())
batch = torch.randn(8, 16, device="cuda")
sharded(batch).square().sum().backward()
print("shards", tuple(sharded.weight.grad.to_local().shape))
"""
# torch's groups as those of allranks, which is the default where ranks share a GPU.
MOVES = """
import os
from allranks.collectives.gpu import transport
os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = str(int(WAY == "nccl"))
if WAY:
    transport.choose = lambda *_: WAY
if WAY == "staged":
    transport.IPC_FROM_BYTES = 1 << 60
"""
TORCH_CALLS = """
import torch
import torch.distributed as dist
from torch import nn
dist.is_initialized() or dist.init_process_group("nccl")
print(dist.get_backend(), type(dist.group.WORLD).__name__)
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64):
    every = [torch.full((3, 5), r + 1, device="cuda").to(dtype) for r in range(size)]
    for op, result in ((dist.ReduceOp.SUM, sum(every)), (dist.ReduceOp.MAX, every[-1])):
        if op == dist.ReduceOp.SUM or not dtype.is_complex:
            tensor = every[rank].clone()
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, result), (dtype, op, tensor)
    found = [torch.zeros_like(each) for each in every]
    dist.all_gather(found, every[rank])
    assert all(map(torch.equal, found, every)), dtype
    whole = torch.cat(every)
    piece = torch.zeros_like(every[0])
    dist.reduce_scatter_tensor(piece, whole)
    assert torch.equal(piece, size * every[rank]), dtype
    dist.all_to_all_single(out := torch.zeros_like(whole), torch.cat([every[rank]] * size))
    assert torch.equal(out, whole), dtype
    dist.broadcast(tensor := every[rank].clone(), size - 1)
    assert torch.equal(tensor, every[-1]), dtype
import allranks.collectives as c
c.world.current().settle()
print("every call by", c.records()[-1].transport)
"""
# What is queued before and after a call, on streams of torch.
TORCH_STREAMS = """
tensors = [torch.zeros(1 << 20, device="cuda") for _ in range(20)]
works = []
for step, tensor in enumerate(tensors):
    torch.cuda._sleep(5_000_000)
    tensor.fill_(step + rank)
    works.append(dist.all_reduce(tensor, async_op=True))
for work in works:
    work.wait()
sums = torch.stack([tensor.sum() / tensor.numel() for tensor in tensors])
assert sums.tolist() == [2 * step + 1 for step in range(20)], sums
other = torch.cuda.Stream()
torch.cuda._sleep(5_000_000)
late = torch.full((1 << 20,), rank + 1.0, device="cuda")
work = dist.all_reduce(late, async_op=True)
with torch.cuda.stream(other):
    work.wait()
    assert late[:: 1 << 10].unique().tolist() == [3.0]
print("streams", len(works))
"""
TORCH_DIFFERS = "dist.all_reduce(torch.ones(3 + rank, device='cuda'))"
TORCH_NEXT = "dist.all_reduce(one := torch.ones(3, device='cuda'))\nprint('next', one.tolist())"
TORCH_WAITS = "dist.all_reduce(torch.ones(3, device='cuda'))"
# Rank 1 leaves a call once the other has launched it, and waits for its result in CUDA.
TORCH_LEAVES = """
import tempfile, time
from pathlib import Path
from unittest.mock import patch
from allranks.collectives.gpu.nccl import NcclTransport
place = Path(broadcast_object(tempfile.mkdtemp())) / "launched"

def leaves(*_):
    while not place.exists():
        time.sleep(0.01)
    raise ValueError("left")

if rank == 1:
    patch.object(NcclTransport, "_reduce", leaves).start()
try:
    dist.all_reduce(garbage := torch.ones(3, device="cuda"))
    place.touch()
    print(garbage.tolist())
finally:
    patch.stopall()
"""
ENSEMBLE = """%%ensemble rate=0.1,0.2,0.3
import cupy
values = cupy.ones(100)
for step in range(5):
    values = values - rate * values
result = float(values.sum())
"""


class Steps:
    """The steps of one notebook, and what was wrong in them."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook, self.folder = notebook, notebook.cwd
        self.wrong: list[str] = []

    def run(self, name: str, source: str, *wanted: str, never: str = "Exception ignored") -> None:
        """Runs a cell, in whose text all of ``wanted`` must be, and ``never`` must not."""
        began = time.monotonic()
        self.check(name, self._notebook.on_ranks(source, timeout=120), began, *wanted, never=never)

    def check(self, name: str, cell: Cell, began: float, *wanted: str, never: str) -> None:
        missing = [part for part in wanted if part not in cell.text]
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        if missing or never in cell.text:
            self.wrong.append(f"{name}: expected {missing}, and no {never!r}; found:\n{cell.text}")

    def magic(self, name: str, source: str, *wanted: str) -> None:
        """Runs a cell in the notebook's kernel."""
        began = time.monotonic()
        self.check(name, self._notebook.run(source, 300), began, *wanted, never="Traceback (")

    def interrupt(
        self, name: str, source: str, begun: str, seconds: float = INTERRUPTED_SECONDS
    ) -> None:
        """Interrupts a cell, which must end within so many seconds: before the work of its GPU."""
        cell = self._notebook.start_on_ranks(source).wait_for(begun)
        self._notebook.drain(1.0)
        began = time.monotonic()
        self._notebook.interrupt()
        cell.wait(60)
        took = time.monotonic() - began
        self.check(name, cell, began, "KeyboardInterrupt", never="will be killed")
        if took > seconds:
            self.wrong.append(f"{name}: ended {took:.1f} s after the interrupt")


def ends(steps: Steps) -> None:
    steps.run("begin", BEGIN, "cuda:0 ", "3.0")
    steps.interrupt("an interrupt while the GPU works", BUSY, "works")
    steps.run("after it", NEXT, "next 2.0 0", "next 2.0 10")
    steps.run("a death", DIES, "rank 1 was replaced", "rank 0 kept its")
    steps.run("after it", f"import cupy\n{NEXT}", "next 2.0 0", "next 2.0 None")
    steps.run("begin again", BEGIN, "3.0")
    broken = "CUDA refuses every further call of rank 1", "rank 1 was replaced, with", "mine."
    steps.run("an illegal access", BREAKS, *broken)
    steps.run("after it", f"import cupy\n{NEXT}", "next 2.0 0", "next 2.0 10")


def arrays(steps: Steps) -> None:
    steps.run("begin", BEGIN, "cuda:0 ", "3.0")
    steps.run("every dtype", DTYPES, "every dtype")
    steps.run("a mismatch", DIFFERS, "CollectiveMismatch", "same shape")
    steps.run("an array on the host", ON_HOST, "CollectiveMismatch")
    steps.run("a rank raises", f"{RAISES}allreduce(mine, Sum)", "no batch", "was waiting")
    steps.interrupt("an interrupt of a wait", f"{WAITS}allreduce(mine, Sum)", "waits")
    steps.run("after it", NEXT, "next 2.0 0", "next 2.0 10")
    steps.run("keep", KEEPS)
    steps.run("a death", DIES, "rank 1 was replaced")
    steps.run("a kept array", "print(type(mine).__module__, mine[0])", "cupy 1.5", "cupy 2.5")
    steps.magic("an ensemble", ENSEMBLE, "0.3")
    many = "%distributed restart -n 64 --exclusive"
    steps.magic("too few GPUs", many, "64 ranks need 64 GPUs")
    (steps.folder / "opens_cuda.py").write_text("import cupy\ncupy.zeros(1)")
    preloads = "%distributed restart -n 2 --preload opens_cuda"
    steps.magic("a module that opens CUDA", preloads, "importing this module initializes CUDA")


def nccl(steps: Steps) -> None:
    steps.run("begin", NCCL, "over nccl 3.0")
    differs = "allreduce(cupy.ones(3 + rank), Sum, transport='nccl')"
    steps.run("a mismatch", differs, "CollectiveMismatch", "same shape")
    steps.run("a rank raises", RAISES + OVER_NCCL, "no batch", "was waiting")
    steps.interrupt("an interrupt of a wait", WAITS + OVER_NCCL, "waits")
    steps.run("after it", NCCL, "over nccl 3.0")
    steps.run("a death amid calls", DIES_AMID, "rank 1 was replaced")
    steps.run("after it", NCCL, "over nccl 3.0")


def ipc(steps: Steps, counts: Sequence[int] = (1000, 16 << 20)) -> None:
    """What becomes of memory that processes share on the GPU when one of them dies."""
    steps.magic("two ranks on one GPU", "%distributed restart -n 2 --gpus 0")
    ipc_deaths(steps, 2, counts)
    steps.interrupt("an interrupt of a wait", WAITS + SUMMED_BY_IPC, "waits")
    steps.run("a mismatch", "allreduce(mine[: 3 + rank], Sum, transport='ipc')", "same shape")
    steps.run("after it", BY_IPC, "ipc right 1.0", "ipc right 2.0")
    steps.magic("four ranks on one GPU", "%distributed restart -n 4 --gpus 0")
    ipc_deaths(steps, 4, counts)


def ipc_deaths(steps: Steps, size: int, counts: Sequence[int]) -> None:
    every = [f"ipc right {rank + 1.0}" for rank in range(size)]
    steps.run("begin", BY_IPC, *every)
    # The first rank reads all windows, and all read its own; the last is read by the first.
    for who, when in ((0, "owner"), (0, "reader"), (size - 1, "owner"), (size - 1, "reader")):
        for count in counts:
            dies = DIES_BY_IPC.replace("WHO", str(who)).replace("WHEN", repr(when))
            name = f"the death of rank {who} of {size} as {when}, {count} numbers"
            steps.run(name, dies.replace("COUNT", str(count)), f"rank {who} was replaced")
            lives = [f"computes {2 * (rank + 1.0)}" for rank in range(size) if rank != who]
            steps.run("the others", f"import cupy\n{KEPT_BY_IPC}", *lives)
            steps.run("after it", BY_IPC, *every)


def torch(steps: Steps) -> None:
    steps.run("tensors", TENSORS, "cuda:0 torch.bfloat16 3.0 (4, 3)")
    full = "rank 1 is out of memory on ", "Also using it: rank 0"
    steps.run("out of memory", FILLS, *full)
    steps.run("after it", EMPTIES, "True")


def torch_nccl(steps: Steps) -> None:
    train = DDP.replace("init_process_group()", "init_process_group('nccl')")
    steps.run("training", train, "equal weights True")
    steps.run("a rank raises", RAISES + BACKWARD, "no batch")
    steps.run("after it", ALIVE, "alive 0", "alive 1")
    steps.run("training again", train, "equal weights True")
    steps.interrupt("an interrupt of a wait", WAITS + BACKWARD, "waits", 5.0)
    steps.run("training again", train, "equal weights True")


def torch_allranks(steps: Steps) -> None:
    """torch's groups as those of allranks, over every transport that ranks on one GPU may have."""
    for way in ("", "staged", "ipc", "nccl"):
        option = " --torch allranks" if way == "nccl" else ""
        steps.magic(f"start {way}", f"%distributed restart -n 2 --gpus 0{option}")
        moves = MOVES.replace("WAY", repr(way))
        steps.run("every call", moves + TORCH_CALLS, "nccl CudaGroup", "every call", f"by {way}")
        steps.run("streams", TORCH_STREAMS, "streams 20")
        steps.run("training", DDP, "equal weights True")
        steps.run("a mismatch", TORCH_DIFFERS, "needs the same shape on every rank")
        steps.run("a rank raises", RAISES + BACKWARD, "no batch", "was waiting")
        steps.interrupt("an interrupt of a wait", WAITS + TORCH_WAITS, "waits")
        steps.run("after it", TORCH_NEXT, "next [2.0, 2.0, 2.0]")
        if way == "nccl":
            left = "ValueError: left", "all_reduce(SUM) needs all of ranks 0–1"
            steps.run("a call that the GPU can never end", TORCH_LEAVES, *left)
            steps.run("after it", TORCH_NEXT, "next [2.0, 2.0, 2.0]")
        dies = f"import os\nif rank == 1:\n    os._exit(3)\n{TORCH_WAITS}"
        steps.run("a death", dies, "rank 1 was replaced")
        steps.run("training again", moves + DDP, "equal weights True")


def jax(steps: Steps) -> None:
    steps.run("arrays", JAX, "gpu gpu 7.0")


def keras_jax(steps: Steps) -> None:
    steps.run("training", KERAS.replace('BACKEND"\n', 'jax"\n'), "jax equal weights True")


def keras_torch(steps: Steps) -> None:
    steps.run("training", KERAS.replace('BACKEND"\n', 'torch"\n'), "torch equal weights True")


def frameworks(steps: Steps) -> None:
    steps.run("Lightning", LIGHTNING, "processes 2 True")
    steps.run("Accelerator", ACCELERATE, "processes 2 cuda")
    steps.run("fully_shard", SHARDED, "shards (1, 16)")


NOTEBOOKS: dict[str, Callable[[Steps], None]] = {
    each.__name__: each
    for each in (
        ends,
        arrays,
        nccl,
        ipc,
        torch,
        torch_nccl,
        torch_allranks,
        jax,
        keras_jax,
        keras_torch,
        frameworks,
    )
}


def wrong(notebook: Callable[[Steps], None]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder, Notebook(Path(folder)) as kernel:
        # Of two ranks with a GPU each, none takes the memory of the other.
        where = " --gpus 0" if notebook is torch else ""
        started = kernel.run(f"%distributed start -n 2{where}", 300)
        if started.status != "ok":
            return [started.text]
        steps = Steps(kernel)
        notebook(steps)
        return steps.wrong


if __name__ == "__main__":
    found = [each for name in sys.argv[1:] or NOTEBOOKS for each in wrong(NOTEBOOKS[name])]
    print("\n".join(found) or "all cells ended as they should")
    raise SystemExit(bool(found))
