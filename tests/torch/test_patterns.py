"""Programs as in torch's tutorials run on groups of allranks: right results, no false alarm."""

from __future__ import annotations

import pytest

from tests.torch.conftest import ALL_HERE
from tests.torch.test_groups import IMPORTS

PATTERNS = {
    "a backward pass through a call is warned of": """
import warnings
said = {}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for name in ("all_reduce", "broadcast"):
        call = dist.all_reduce if name == "all_reduce" else lambda x: dist.broadcast(x, 0)
        weights = torch.ones(2, requires_grad=True)
        for used in (weights * 2, (weights * 2).detach()):
            call(used)
        with torch.no_grad():
            call(weights * 2)
        call(measured := weights.sum())  # which no backward pass goes through
        seen.clear()
        call(y := weights * 2)
        assert not seen
        y.sum().backward()
        said[name] = [str(one.message) for one in seen]
# torch's own gloo warns, too.
told = "has no gradient", "an autograd kernel was not registered"
assert all(any(part in text for part in told) for (text,) in said.values()), said
""",
    "models that share gradients": """
def trained(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(net, **options)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.full((2, 4), rank + 1.0)).square().mean().backward()
        model(torch.full((2, 4), rank + step + 1.0)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

first = trained()
others = [trained(gradient_as_bucket_view=True), trained(find_unused_parameters=True),
          trained(bucket_cap_mb=0.0001)]
every = [torch.zeros_like(first) for _ in range(size)]
dist.all_gather(every, first)
assert all(torch.equal(first, other) for other in (*others, *every))
""",
    "a static graph": """
def trained(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
    model = nn.parallel.DistributedDataParallel(net, **options)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), rank + step + 1.0)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

# Its reducer makes all calls of the first step in the last callback of the backward.
assert torch.allclose(trained(static_graph=True), trained(), atol=1e-6)
""",
    "elements of a column, and no elements": """
def column(value, dtype=torch.bfloat16):
    found = torch.full((1, 2), value, dtype=dtype)[:, 0]
    assert found.is_contiguous() and found.stride() == (2,)
    return found

every = [column(-1) for _ in range(size)]
dist.all_gather(every, column(rank))
assert [int(one) for one in every] == list(range(size))
mine = column(-1)
dist.scatter(mine, [column(10 + r) for r in range(size)] if rank == 0 else None)
assert int(mine) == 10 + rank
dist.broadcast(mine, 1)
assert int(mine) == 11
dist.all_to_all(every, [column(10 * rank + r) for r in range(size)])
assert [int(one) for one in every] == [10 * r + rank for r in range(size)]
for op in (dist.ReduceOp.BOR, dist.ReduceOp.BAND):
    for dtype in (torch.int64, torch.bool):
        none = torch.zeros(3, 0, dtype=dtype)
        dist.all_reduce(none, op)
        assert none.shape == (3, 0)
bits = column(1 << rank, torch.int32)
dist.all_reduce(bits, dist.ReduceOp.BOR)
assert int(bits) == (1 << size) - 1
""",
    "tensors of several chunks": """
for dtype in (torch.float32, torch.float64, torch.float16, torch.int32):
    every = [(torch.arange(1_200_001) % 7 + r).to(dtype) for r in range(size)]
    expected = {dist.ReduceOp.SUM: sum(every), dist.ReduceOp.MAX: every[-1]}
    for op, result in expected.items():
        found, others = every[rank].clone(), every[rank].clone()
        dist.all_reduce(found, op)
        works = [dist.all_reduce(part, op, async_op=True) for part in others.split(500_000)]
        for work in works:
            work.wait()
        assert torch.equal(found, result) and torch.equal(others, result), (dtype, op)
""",
    "models with large gradients": """
def trained(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(600, 700), nn.ReLU(), nn.Linear(700, 600))
    model = nn.parallel.DistributedDataParallel(net, **options)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(step * size + rank)
        model(torch.randn(4, 600)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

def shared():
    with open("/proc/self/maps") as maps:
        return "/dev/shm/torch_" in maps.read()

import gc
gc.collect()
# The memory of buckets is shared, unless gradients are views of it.
other = trained(gradient_as_bucket_view=True)
assert not shared()
first = trained()
assert shared()
every = [torch.zeros_like(first) for _ in range(size)]
dist.all_gather(every, first)
assert all(torch.equal(first, each) for each in (other, *every))
""",
    "compression hooks": """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
for state, hook in (
    (None, default_hooks.allreduce_hook),
    (None, default_hooks.fp16_compress_hook),
    (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    model.register_comm_hook(state, hook)
    for step in range(4):
        model(torch.full((2, 8), rank + 1.0)).sum().backward()
    every = [torch.zeros(8, 8) for _ in range(size)]
    dist.all_gather(every, model.module.weight.grad)
    assert all(torch.equal(every[0], other) for other in every)
""",
    "fully sharded": """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))
for part in net:
    if list(part.parameters()):
        fully_shard(part)
model = fully_shard(net)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
losses = []
for step in range(20):
    optimizer.zero_grad()
    loss = (model(torch.full((3, 5), 1.0 + rank)) - 2).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0]
assert model[0].weight.full_tensor().shape == (7, 5)
""",
    "fully sharded by FSDP1": """
import warnings
from torch.distributed.fsdp import FullyShardedDataParallel
warnings.filterwarnings("ignore")

def trained(wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(4):
        optimizer.zero_grad()
        (model(torch.full((3, 5), 1.0 + rank)) - 2).square().mean().backward()
        optimizer.step()
    return model

sharded = trained(lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")))
whole = trained(nn.parallel.DistributedDataParallel)
with FullyShardedDataParallel.summon_full_params(sharded):
    pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
    assert all(torch.allclose(a.flatten(), b.flatten(), atol=1e-6) for a, b in pairs)
""",
    "storages stay resizable": """
def resizable(*tensors):
    return all(tensor.untyped_storage().resizable() for tensor in tensors)

for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16):
    x, outs = torch.ones(3, dtype=dtype), [torch.ones(3, dtype=dtype) for _ in range(size)]
    for _ in range(2):
        dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.all_gather(outs, x)
    assert resizable(x, *outs), dtype
""",
    "distributed tensors": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (size,))
whole = torch.arange(56.0).reshape(7, 8)
rows = distribute_tensor(whole, mesh, [Shard(0)])
columns = rows.redistribute(mesh, [Shard(1)])
assert torch.equal(columns.full_tensor(), whole)
assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
product = rows.T.contiguous() @ rows
assert torch.allclose(product.full_tensor(), whole.T @ whole)
assert torch.equal((rows + 1).sum().full_tensor(), (whole + 1).sum())
""",
    "two dimensions of a mesh": """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("outer", "inner"))
t = torch.ones(2)
dist.all_reduce(t, group=mesh.get_group("inner"))
dist.all_reduce(t, group=mesh.get_group("outer"))
assert t.tolist() == [size, size]
""",
    "a pipeline": """
stage = nn.Linear(4, 4)
kept_works = []
for batch in range(6):
    x = torch.ones(2, 4) * batch if rank == 0 else torch.empty(2, 4)
    if rank > 0:
        dist.recv(x, rank - 1)
        assert torch.equal(x, torch.full((2, 4), float(batch + rank)))
    if rank < size - 1:
        kept_works.append(dist.isend(x + 1, rank + 1))
for work in kept_works:
    work.wait()
""",
    "a ring of large messages": """
mine, theirs = torch.full((2_000_000,), float(rank)), torch.empty(2_000_000)
works = dist.batch_isend_irecv([
    dist.P2POp(dist.isend, mine, (rank + 1) % size),
    dist.P2POp(dist.irecv, theirs, (rank - 1) % size),
])
for work in works:
    work.wait()
assert theirs.unique().tolist() == [(rank - 1) % size]
""",
    "a receive that is posted before a collective": """
x, sums = torch.empty(1_000_000), torch.ones(1)
if rank == 1:
    work = dist.irecv(x, 0)
    dist.all_reduce(sums)
    work.wait()
    assert x.unique().tolist() == [5.0]
else:
    if rank == 0:
        dist.send(torch.full((1_000_000,), 5.0), 1)
    dist.all_reduce(sums)
""",
    "messages of any rank, tags and groups": """
part = dist.new_group([0, 1, 2])
if rank == 0:
    senders = set()
    for _ in range(2):
        x = torch.empty(1)
        source = dist.recv(x, tag=5)
        assert x.item() == 10 * source
        senders.add(source)
    assert senders == {1, 2}
    a, b, c = torch.empty(1), torch.empty(1), torch.empty(1)
    dist.recv(b, 1, tag=7)
    dist.recv(c, 1, group=part)
    dist.recv(a, 1)
    assert (a.item(), b.item(), c.item()) == (1, 2, 3)
else:
    dist.send(torch.tensor([10.0 * rank]), 0, tag=5)
    if rank == 1:
        dist.send(torch.tensor([1.0]), 0)
        dist.send(torch.tensor([2.0]), 0, tag=7)
        dist.send(torch.tensor([3.0]), 0, group=part)
""",
    "objects": """
every = [None] * size
dist.all_gather_object(every, {"rank": rank, "text": "x" * (10 * rank)})
assert [each["rank"] for each in every] == list(range(size))
some = [rank, "first"] if rank == 0 else [None, None]
dist.broadcast_object_list(some)
assert some == [0, "first"]
mine = [None]
dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 1 else None, src=1)
assert mine == [f"for {rank}"]
found = [None] * size if rank == 2 else None
dist.gather_object(rank, found, dst=2)
assert rank != 2 or found == list(range(size))
if rank == 0:
    dist.send_object_list([{"a": 1}], 1)
elif rank == 1:
    got = [None]
    dist.recv_object_list(got, 0)
    assert got == [{"a": 1}]
""",
    "pieces of different sizes": """
counts = [[1, 2, 3], [0, 4, 1], [2, 2, 2]]
send, receive = counts[rank], [row[rank] for row in counts]
x, out = torch.full((sum(send), 2), float(rank)), torch.empty(sum(receive), 2)
dist.all_to_all_single(out, x, receive, send)
assert out[:, 0].tolist() == [r for r in range(size) for _ in range(counts[r][rank])]
outs = [torch.empty(n) for n in receive]
dist.all_to_all(outs, [torch.full((n,), float(rank)) for n in send])
assert [o.tolist() for o in outs] == [[float(r)] * receive[r] for r in range(size)]
""",
    "operations and dtypes": """
R = dist.ReduceOp
ones = torch.tensor([1, 2, 4]) << rank
for op, value in ((R.BAND, 1 & 2 & 4), (R.BOR, 7), (R.BXOR, 7), (R.MAX, 4), (R.MIN, 1),
                  (R.PRODUCT, 8), (R.SUM, 7)):
    x = ones.clone()
    dist.all_reduce(x, op)
    assert x[0].item() == value, (op, x)
for kind in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.complex64):
    x = torch.ones(5, dtype=kind)
    dist.all_reduce(x)
    assert x.dtype == kind and x[4].item() == 3
    every = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(every, x * 0 + rank)
    assert [e[0].item().real for e in every] == [0, 1, 2]
x = torch.full((4,), float(rank))
dist.all_reduce(x, R.AVG)
assert x.tolist() == [1.0] * 4
sparse = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (4,), check_invariants=True)
dist.all_reduce(sparse)
assert sparse.to_dense().tolist() == [1, 1, 1, 6]
turned = torch.arange(6.0).reshape(2, 3).T
dist.all_reduce(turned)
assert turned.tolist() == [[0, 9], [3, 12], [6, 15]]
scalar = torch.tensor(2.0)
dist.all_reduce(scalar)
assert scalar.item() == 6
empty = torch.empty(0)
dist.all_reduce(empty)
dist.broadcast(empty, 1)
narrow = torch.ones(4, dtype=torch.float8_e4m3fn)
dist.broadcast(narrow, 2)
""",
    "every collective": """
x = torch.arange(3.0) + rank
dist.broadcast(x, 1)
assert x.tolist() == [1, 2, 3]
x = torch.full((2,), float(rank))
dist.reduce(x, 2)
assert rank != 2 or x.tolist() == [3, 3]
parts = [torch.empty(2) for _ in range(size)] if rank == 1 else None
dist.gather(torch.full((2,), float(rank)), parts, dst=1)
assert rank != 1 or [p[0].item() for p in parts] == [0, 1, 2]
out = torch.empty(2)
dist.scatter(out, [torch.full((2,), float(r)) for r in range(size)] if rank == 0 else None)
assert out.tolist() == [rank, rank]
out = torch.empty(2)
dist.reduce_scatter(out, [torch.full((2,), float(r)) for r in range(size)])
assert out.tolist() == [3.0 * rank] * 2
out = torch.empty(1, 2)
dist.reduce_scatter_tensor(out, torch.arange(6.0).reshape(3, 2))
assert out.tolist() == [[6.0 * rank, 6.0 * rank + 3]]
both = torch.arange(6.0)
dist.reduce_scatter_tensor(both[2 * rank : 2 * rank + 2], both)
assert both[2 * rank : 2 * rank + 2].tolist() == [6.0 * rank, 6.0 * rank + 3]
out = torch.empty(3, 2)
dist.all_gather_into_tensor(out, torch.full((1, 2), float(rank)))
assert out[:, 0].tolist() == [0, 1, 2]
dist.barrier()
dist.monitored_barrier()
""",
    "calls that are posted": """
works, results = [], []
for number in range(20):
    x = torch.full((number + 1,), float(rank))
    results.append(x)
    works.append(dist.all_reduce(x, async_op=True))
for work in reversed(works):
    work.wait()
assert all(x.tolist() == [3.0] * len(x) for x in results)
assert all(work.is_completed() and work.is_success() for work in works)
work = dist.all_reduce(x, async_op=True)
future = work.get_future().then(lambda done: done.value()[0] * 2)
assert future.wait()[0].item() == 18
with dist._coalescing_manager(async_ops=True) as several:
    a, b = torch.ones(2), torch.ones(3)
    dist.all_reduce(a)
    dist.all_reduce(b)
several.wait()
assert a.tolist() == [3, 3] and b.tolist() == [3, 3, 3]
""",
    "functional collectives": """
import torch.distributed._functional_collectives as functional
x = torch.ones(4) * (rank + 1)
assert functional.all_reduce(x, "sum", dist.group.WORLD).tolist() == [6] * 4
assert functional.all_gather_tensor(x, 0, dist.group.WORLD).shape == (12,)
y = functional.reduce_scatter_tensor(torch.ones(6), "sum", 0, dist.group.WORLD)
assert y.tolist() == [3, 3]
z = functional.all_to_all_single(torch.arange(3.0) + rank, None, None, dist.group.WORLD)
assert z.tolist() == [rank, rank + 1, rank + 2]
assert functional.broadcast(x, 1, dist.group.WORLD).tolist() == [2] * 4

@torch.compile(backend="aot_eager", fullgraph=True)
def summed(x):
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

assert summed(x).tolist() == [13] * 4
""",
    "a compiled step": """
import warnings
warnings.filterwarnings("ignore")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))

@torch.compile(backend="eager")
def step(x):
    model.zero_grad()
    model(x).sum().backward()
    y = x * 2
    dist.all_reduce(y)
    dist.broadcast(y, 1)
    if dist.get_rank() == 0:
        dist.send(y + 1, 1)
    elif dist.get_rank() == 1:
        dist.recv(y, 0)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    dist.barrier()
    return y + 1

compiled = torch.compile(model, backend="eager")
for _ in range(3):
    assert step(torch.ones(1, 4)).tolist() == [[2.0 * size + 1 + (rank == 1)] * 4]
    compiled(torch.ones(1, 4)).sum().backward()
torch._dynamo.reset()
""",
    "groups of some ranks": """
for _ in range(3):
    parts = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    for part, members in zip(parts, ((0, 1), (1, 2), (0, 2))):
        if rank in members:
            x = torch.ones(100_000) * rank
            dist.all_reduce(x, group=part)
            assert x[-1].item() == sum(members)
            assert dist.get_process_group_ranks(part) == list(members)
    for part in parts:
        dist.destroy_process_group(part)
if rank > 0:
    own = dist.new_group([1, 2], use_local_synchronization=True)
    x = torch.ones(1)
    dist.all_reduce(x, group=own)
    assert x.item() == 2
if hasattr(dist, "split_group"):
    half = dist.split_group(None, [[0], [1, 2]])
    x = torch.ones(1)
    dist.all_reduce(x, group=half)
    assert x.item() == (1 if rank == 0 else 2)
""",
    "a checkpoint": """
import tempfile
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
place = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(place)
mesh = init_device_mesh("cpu", (size,))
state = {"weight": distribute_tensor(torch.arange(12.0), mesh, [Shard(0)]), "step": 3}
checkpoint.save(state, checkpoint_id=place[0])
loaded = {"weight": distribute_tensor(torch.zeros(12), mesh, [Shard(0)]), "step": 0}
checkpoint.load(loaded, checkpoint_id=place[0])
assert torch.equal(loaded["weight"].full_tensor(), torch.arange(12.0)) and loaded["step"] == 3
""",
    "an optimizer that shares its state": """
from torch.distributed.optim import ZeroRedundancyOptimizer
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 6), rank + 1.0)).square().mean().backward()
    optimizer.step()
every = [torch.zeros(3, 6) for _ in range(size)]
dist.all_gather(every, model.module.weight.detach())
assert all(torch.equal(every[0], other) for other in every)
""",
    "fewer batches on a rank": """
from torch.distributed.algorithms.join import Join
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
with Join([model]):
    for step in range(2 + rank):
        model(torch.ones(1, 2)).sum().backward()
""",
}


@pytest.fixture(scope="module", autouse=True)
def _begun(ranks):
    assert ranks.on_ranks(IMPORTS).status == "ok"
    begun = ranks.on_ranks("dist.is_initialized() or dist.init_process_group('gloo')")
    assert begun.status == "ok", begun.text
    yield
    assert ranks.on_ranks("dist.destroy_process_group()").status == "ok"


@pytest.mark.parametrize("source", PATTERNS.values(), ids=PATTERNS.keys())
def test_a_program_runs_as_on_gloo(ranks, source):
    cell = ranks.on_ranks(f"{source}\n'right'", timeout=180)
    assert cell.status == "ok", cell.text
    assert "→ 'right'\n" in cell.text


LARGE = """
model = nn.parallel.DistributedDataParallel(nn.Linear(600, 700))
model(torch.ones(4, 600)).sum().backward()

def shared():
    with open("/proc/self/maps") as maps:
        return "/dev/shm/torch_" in maps.read()

shared()
"""


def test_the_shared_memory_of_buckets_ends_with_their_model(ranks):
    assert ranks.on_ranks(LARGE).text == "ranks 0–2 → True\n"
    ended = ranks.on_ranks("import gc\ndel model\ngc.collect()")
    assert ended.status == "ok", ended.text
    # At the end of the next cell, all ranks know that the others have freed it.
    assert ranks.on_ranks("pass").status == "ok"
    assert ranks.on_ranks("shared()").text == "ranks 0–2 → False\n"


def test_the_name_of_the_backend_is_the_one_that_was_asked_for(ranks):
    assert (
        ranks.on_ranks(
            "dist.destroy_process_group()\ndist.init_process_group('gloo')\n"
            "part = dist.new_group([0, 1])\n"
            "dist.get_backend(), type(dist.group.WORLD).__name__"
        ).text
        == "ranks 0–2 → ('gloo', 'AllranksGroup')\n"
    )
    assert (
        ranks.on_ranks(
            "dist.destroy_process_group()\ndist.init_process_group()\n"
            "type(dist.group.WORLD).__name__, dist.get_world_size()"
        ).text
        == "ranks 0–2 → ('AllranksGroup', 3)\n"
    )


def test_a_limit_of_time_is_worded_as_in_torch(ranks, tmp_path):
    ended = str(tmp_path)
    cell = ranks.on_ranks(
        "import os, time\nfrom datetime import timedelta\n"
        "part = dist.new_group([0, 1], timeout=timedelta(seconds=1))\n"
        "if rank == 1:\n    try:\n        dist.all_reduce(torch.ones(1), group=part)\n"
        f"    finally:\n        open(os.path.join({ended!r}, 'ended'), 'w').close()\n"
        f"else:\n    while not os.listdir({ended!r}): time.sleep(0.02)"
    )
    assert "Timed out waiting 1000ms for all_reduce(SUM) to complete at In[" in cell.text
    assert "rank 0 did not arrive" in cell.text
    assert ranks.on_ranks("dist.all_reduce(x := torch.ones(1))\nint(x)").text == "ranks 0–2 → 3\n"


REFUSED = {
    "bits of floating-point numbers": "dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)",
    "an order of complex numbers": "dist.all_reduce(torch.ones(3) * 1j, dist.ReduceOp.MAX)",
    "an expanded tensor": "dist.all_reduce(torch.ones(1).expand(3))",
    "expanded outputs": "dist.all_gather([torch.ones(1).expand(3)] * size, torch.ones(3))",
    "one output for all members": "dist.all_gather([torch.ones(3)] * size, torch.ones(3))",
    "outputs that overlap": ("dist.all_gather(list(torch.ones(5).unfold(0, 3, 1)), torch.ones(3))"),
    "outputs of another shape": (
        "dist.all_gather([torch.ones(3, 2) for _ in range(size)], torch.ones(2, 3))"
    ),
    "an output of another dtype": (
        "dist.reduce_scatter_tensor(torch.ones(1), torch.ones(3, dtype=torch.float64))"
    ),
    "an output of another size": "dist.all_to_all_single(torch.ones(6), torch.ones(3))",
    "outputs of another dtype": (
        "dist.all_to_all([torch.ones(1, dtype=torch.int32)] * size, [torch.ones(1)] * size)"
    ),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_call_that_is_caught_spoils_no_later_call(ranks, call):
    cell = ranks.on_ranks(
        f"refused = False\ntry:\n    {call}\nexcept Exception as error:\n    refused = True\n"
        "dist.all_reduce(x := torch.ones(1))\nrefused, int(x)"
    )
    assert cell.text.endswith("→ (True, 3)\n"), cell.text
    assert cell.text.count("→") == 1  # all ranks


def test_a_broadcast_from_an_expanded_tensor_and_an_expanded_input_are_right(ranks):
    cell = ranks.on_ranks(
        "x = torch.ones(1).expand(3) if rank == 1 else torch.zeros(3)\ndist.broadcast(x, 1)\n"
        "every = [torch.empty(3) for _ in range(size)]\n"
        "dist.all_gather(every, torch.full((1,), float(rank)).expand(3))\n"
        "x.tolist(), [int(each[2]) for each in every]"
    )
    assert cell.text == "ranks 0–2 → ([1.0, 1.0, 1.0], [0, 1, 2])\n"


BESIDE_TRAINING = """
import tempfile, warnings
from torch.distributed import checkpoint
warnings.filterwarnings("ignore")
folder, saving = broadcast_object(tempfile.mkdtemp()), dist.new_group()
model = nn.parallel.DistributedDataParallel(nn.Linear(30, 30))
saved = None
for step in range(20):
    model.zero_grad()
    model(torch.ones(4, 30)).sum().backward()
    if step % 5 == 0:
        if saved is not None:
            saved.result()
        state = {"model": model.module.state_dict()}
        saved = checkpoint.async_save(
            state, checkpoint_id=f"{folder}/{step}", process_group=saving
        )
saved.result()
loaded = {"model": nn.Linear(30, 30).state_dict()}
checkpoint.load(loaded, checkpoint_id=f"{folder}/15")
torch.equal(loaded["model"]["weight"], model.module.weight)
"""


def test_a_thread_saves_in_a_group_of_its_own_beside_the_training(ranks):
    assert ranks.on_ranks(BESIDE_TRAINING, timeout=120).text.endswith("ranks 0–2 → True\n")


def test_an_exception_in_a_callback_of_a_future_keeps_its_type(ranks):
    cell = ranks.on_ranks(
        "work = dist.isend(torch.ones(1), (rank + 1) % size)\ndist.recv(torch.empty(1))\n"
        "future = work.get_future().then(lambda done: {}['missing'])\n"
        "try:\n    future.wait()\nexcept KeyError as error:\n    print(error)"
    )
    assert cell.text == "ranks 0–2 │ 'missing'\n"


def test_a_handle_that_no_cell_has_waited_for_says_so(ranks):
    posted = "if rank > 0:\n    work = dist.all_reduce(torch.ones(1), async_op=True)"
    assert ranks.on_ranks(posted).status == "ok"
    cell = ranks.on_ranks("if rank > 0:\n    work.wait()")
    assert "its cell has failed, or has not waited for it. Post it again, and wait" in cell.text


def test_ranks_make_different_groups_at_the_same_time(ranks):
    cell = ranks.on_ranks(
        "alone = dist.new_group([rank])\npart = dist.new_group([0] if rank == 0 else [1, 2])\n"
        "dist.all_reduce(x := torch.ones(1), group=part)\ndist.all_reduce(x, group=alone)\n"
        "dist.all_reduce(y := torch.ones(1))\nint(x), int(y)"
    )
    assert cell.text == "rank 0    → (1, 3)\nranks 1–2 → (2, 3)\n"


def test_members_that_differ_are_named_as_ranks(ranks):
    cell = ranks.on_ranks("dist.new_group([0, 1] if rank == 1 else [0, 2])")
    assert (
        "new_group needs the same ranks on every rank: rank 1 has (0, 1), ranks 0, 2 have (0, 2). "
        "Pass the same list on every rank"
    ) in cell.text


def test_a_model_whose_backward_has_failed_says_to_wrap_it_again(ranks):
    ranks.on_ranks(
        "model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))\n"
        "if rank == 0:\n    raise ValueError\nmodel(torch.ones(1, 3)).sum().backward()"
    )
    again = "model(torch.ones(1, 3)).sum().backward()"
    assert "wrap the model again: model = DistributedDataParallel(model.module)" in (
        ranks.on_ranks(f"{again}\n{again}").text
    )


IN_CPP = """
def waiting(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return torch.futures.collect_all([work.get_future()]).wait()[0]

model.register_comm_hook(None, waiting)
model(torch.ones(1, 3)).sum().backward()
"""
WAITS = {
    "a barrier": "dist.barrier()",
    "a backward pass": "model(torch.ones(1, 3)).sum().backward()",
    "a receive": "dist.recv(torch.ones(3), 0)",
    "a new group": "dist.new_group([0, 1, 2])",
    "a posted call": "dist.all_reduce(torch.ones(3), async_op=True).wait()",
    "a future for which C++ waits": IN_CPP,
}


@pytest.mark.covers("interrupt", "torch on allranks")
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_an_interrupt_reaches_a_wait_and_the_groups_stay(ranks, wait):
    cell = ranks.start_on_ranks(
        "model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))\nimport time\n"
        f"print('here')\nif rank == 0:\n    time.sleep(600)\n{wait}"
    ).wait_for(ALL_HERE)
    ranks.drain(0.5)
    ranks.interrupt()
    ended = cell.wait()
    assert ended.error_name == "CellInterrupted", ended.text
    assert "KeyboardInterrupt" in ended.error_value
    following = ranks.on_ranks("dist.all_reduce(x := torch.ones(1))\nint(x)")
    assert following.text == "ranks 0–2 → 3\n"


@pytest.mark.covers("timing", "torch on allranks")
def test_the_panel_shows_the_times_of_torchs_calls(ranks):
    source = "for _ in range(3):\n    dist.all_reduce(torch.ones(1000))\ndist.barrier()"
    shown = str(ranks.on_ranks(source, "--view full").displays)
    assert "all_reduce In[" in shown
    assert "barrier" in shown
