"""torch's process groups on tensors of CUDA, on the FAKE cupy: results, mismatches, which stream
waits for what, and how calls end.

Every tensor here counts as one of CUDA, see ``fake_cuda_tensors``. Needs torch.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch", reason="the package torch is missing")
fake = pytest.importorskip("fake_cuda_tensors", reason="needs tests/fakes/gpu on PYTHONPATH")

import cupy  # noqa: E402
import torch.distributed as dist  # noqa: E402
from conftest import ODD, in_a_cell, interrupted_after, odd, until  # noqa: E402
from cupy.cuda import _queue, nccl, runtime  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch import nn  # noqa: E402

import allranks.collectives as c  # noqa: E402
from allranks.collectives.gpu.nccl import NcclTransport  # noqa: E402
from allranks.errors import CollectiveMismatch, MissingDependency, RankLeft, StaleHandle  # noqa: E402
from allranks.features.torch_jax import choice, cuda, hook  # noqa: E402

SIZE, RANK = c.size(), c.rank()
TOTAL = SIZE * (SIZE + 1) / 2
TAG = 58
BUS = runtime.deviceGetPCIBusId(0)
SHARED = len(set(c.allgather_object(BUS))) < SIZE
"""True where ranks share a GPU: the data is staged through host memory."""
if SIZE == 1:
    pytest.skip("without mpiexec's ranks torch finds no address", allow_module_level=True)
# Newer versions of torch have other names for some calls.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
over_nccl = pytest.mark.skipif(SHARED, reason="needs a GPU for each rank")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(choice.SETTING, "allranks")
        hook.install()
        fake.install()
        yield


@pytest.fixture(autouse=True)
def _group(_installed: None) -> None:
    if not dist.is_initialized():
        dist.init_process_group("nccl")


def mine(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.full(shape or (4,), RANK + 1, dtype=dtype)


def every(*shape: int, dtype: Any = torch.float32) -> list[Any]:
    return [torch.full(shape or (4,), rank + 1, dtype=dtype) for rank in range(SIZE)]


def moved_by() -> str:
    c.world.current().settle()
    return c.records()[-1].transport


@pytest.fixture
def gate() -> Iterator[Any]:
    """An event for which torch's current stream waits, until the test opens it."""
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    stream.wait_event(event)
    with fake.torch_stream(stream):
        yield event
        opened(event)


def opened(event: Any) -> None:
    event.record(cupy.cuda.Stream(non_blocking=True))


def written(tensor: Any, value: float) -> None:
    """Queues a write to a tensor on torch's current stream."""
    fake.current[-1]._add(lambda: tensor.fill_(value) is None)


def found(tensor: Any) -> list[float]:
    """What torch's current stream finds in a tensor, when it has come so far."""
    seen: list[float] = []
    fake.current[-1]._add(lambda: seen.extend(tensor.tolist()))
    with fake.current[-1]:
        _queue.finish()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_reductions_are_in_place(dtype, shape):
    tensor = torch.full(shape, RANK + 1, dtype=dtype)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full(shape, TOTAL, dtype=dtype))
    dist.reduce(other := torch.full(shape, RANK + 1, dtype=dtype), SIZE - 1)
    assert torch.equal(other, torch.full(shape, TOTAL if RANK == SIZE - 1 else RANK + 1).to(dtype))


def test_a_call_is_counted_as_one_on_the_gpu():
    dist.all_reduce(mine(1000))
    assert moved_by() == ("staged" if SHARED else "nccl")
    record = c.records()[-1]
    assert (record.op, record.nbytes, record.dtype) == ("all_reduce", 4000, "float32")
    assert record.device_seconds is not None


def test_tensors_of_any_layout_are_read_and_written():
    whole = torch.zeros(4, 6)
    for part in (whole.T, whole[::2], whole[:, 1], whole[1:3, 2:5]):
        part.fill_(RANK + 1)
        dist.all_reduce(part)
        assert (part == TOTAL).all()
        dist.broadcast(part.fill_(RANK), SIZE - 1)
        assert (part == SIZE - 1).all()


def test_every_call_moves_between_gpus():
    outs = [torch.zeros(2, 2).T for _ in range(SIZE)]
    dist.all_gather(outs, mine(2, 2))
    assert all(torch.equal(out, one) for out, one in zip(outs, every(2, 2), strict=True))
    dist.all_gather_into_tensor(whole := torch.zeros(SIZE * 3), mine(3))
    assert torch.equal(whole, torch.cat(every(3)))
    dist.gather(mine(2), outs := every(2) if RANK == 0 else None)
    assert RANK or all(map(torch.equal, outs, every(2)))
    dist.scatter(out := torch.zeros(2), every(2) if RANK == 0 else None)
    assert torch.equal(out, mine(2))
    dist.reduce_scatter_tensor(out := torch.zeros(2), torch.arange(2.0 * SIZE), dist.ReduceOp.AVG)
    assert torch.equal(out, torch.arange(2.0 * SIZE).chunk(SIZE)[RANK])
    dist.reduce_scatter(out := torch.zeros(2), every(2))
    assert torch.equal(out, mine(2) * SIZE)
    dist.all_to_all_single(out := torch.zeros(SIZE), torch.full((SIZE,), RANK + 1.0))
    assert torch.equal(out, torch.cat(every(1)))
    dist.all_to_all(outs := [torch.zeros(r + 1) for r in range(SIZE)], [mine(RANK + 1)] * SIZE)
    assert all(torch.equal(out, torch.full((r + 1,), r + 1.0)) for r, out in enumerate(outs))
    dist.all_reduce_coalesced(several := [mine(2), mine(3, 3)])
    assert all((tensor == TOTAL).all() for tensor in several)
    c.world.current().settle()
    assert {each.transport for each in c.records()[-9:]} == {"staged" if SHARED else "nccl"}


def test_what_cupy_cannot_reduce_goes_through_the_host():
    dist.all_reduce(bits := torch.tensor([1 << RANK]), dist.ReduceOp.BOR)
    assert bits.item() == (1 << SIZE) - 1
    dist.all_reduce(sparse := torch.eye(3).to_sparse())
    assert torch.equal(sparse.to_dense(), SIZE * torch.eye(3))
    work = dist.all_reduce(bits, dist.ReduceOp.BAND, async_op=True)
    work.wait()
    assert bits.item() == (1 << SIZE) - 1
    assert moved_by() not in ("nccl", "staged")


def test_messages_go_through_the_host():
    following, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    work = dist.isend(mine(3), following)
    dist.recv(out := torch.zeros(3), before)
    work.wait()
    assert torch.equal(out, every(3)[before])
    received = dist.irecv(out := torch.zeros(2, 2).T, before)
    dist.send(mine(2, 2), following)
    received.wait()
    assert (out == before + 1).all()


def test_groups_of_some_ranks_use_their_gpus_in_one_order():
    groups = [dist.new_group([rank, (rank + 1) % SIZE]) for rank in range(SIZE)]
    both = [groups[RANK], groups[RANK - 1]]
    works = [dist.all_reduce(mine(), group=group, async_op=True) for group in both]
    dist.all_reduce(tensor := mine())
    for work in reversed(works):
        work.wait()
    assert (tensor == TOTAL).all()


@over_nccl
def test_a_call_is_behind_torchs_stream_which_waits_for_it_and_not_the_host(gate):
    first, second = mine(), mine()
    written(first, 10.0)
    works = [dist.all_reduce(each, async_op=True) for each in (first, second)]
    for work in works:
        work.wait()
    dist.all_reduce(first)
    # The host is here, and the stream has not even produced the input.
    assert not works[0].is_completed()
    assert first.tolist() == [RANK + 1] * 4
    opened(gate)
    assert found(first) == [10.0 * SIZE * SIZE] * 4
    assert found(second) == [TOTAL] * 4


@over_nccl
def test_another_stream_may_wait_for_a_call(gate):
    dist.all_reduce(warm := mine())
    work = dist.all_reduce(tensor := mine(), async_op=True)
    opened(gate)
    other = cupy.cuda.Stream(non_blocking=True)
    with fake.torch_stream(other):
        work.wait()
        assert found(tensor) == [TOTAL] * 4
    assert len(found(warm)) == 4


@over_nccl
def test_results_that_are_copied_to_their_place_are_there_for_the_stream_that_waits(gate):
    outs = [torch.zeros(2, 2).T for _ in range(SIZE)]
    dist.all_gather(outs, mine(2, 2))
    opened(gate)
    assert [found(out)[0] for out in outs] == [[rank + 1.0] * 2 for rank in range(SIZE)]


@over_nccl
def test_a_barrier_waits_for_the_work_of_torchs_stream(gate):
    dist.all_reduce(tensor := mine())
    threading.Timer(0.2, opened, [gate]).start()
    dist.barrier()
    assert tensor.tolist() == [TOTAL] * 4


def test_a_mismatch_is_named_before_anything_is_launched():
    before, tensor = len(nccl.launched), mine(3 + odd())
    with pytest.raises(CollectiveMismatch, match=r"all_reduce\(SUM\) needs the same shape.*\(4,\)"):
        dist.all_reduce(tensor)
    assert len(nccl.launched) == before
    assert (tensor == RANK + 1).all()
    tensor = cuda.to_host(tensor[:3]) if odd() else tensor[:3]
    with pytest.raises(CollectiveMismatch, match="all_reduce"):
        dist.all_reduce(tensor)
    dist.all_reduce(tensor := mine())
    assert (tensor == TOTAL).all()


def test_tensors_of_one_call_are_in_one_memory():
    with pytest.raises(ValueError, match="needs all tensors on the GPU, or none"):
        dist.all_gather_into_tensor(torch.zeros(SIZE), cuda.to_host(torch.ones(1)))


def test_a_rank_that_has_left_ends_the_wait_of_the_others():
    def cell() -> None:
        if odd():
            raise ValueError
        dist.all_reduce(mine())

    error = in_a_cell(cell)
    assert isinstance(error, ValueError if odd() else RankLeft)
    dist.all_reduce(tensor := mine())
    assert (tensor == TOTAL).all()


def test_an_interrupt_ends_a_wait():
    def cell() -> None:
        if odd():
            with interrupted_after(0.1):
                threading.Event().wait(20)
        dist.all_reduce(mine())

    error = in_a_cell(cell)
    assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)


def left_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank leaves the next call before it launches, once the others have launched."""

    def interrupted(*_: object) -> None:
        for rank in range(SIZE):
            if rank != RANK:
                MPI.COMM_WORLD.recv(source=rank, tag=TAG)
        raise KeyboardInterrupt

    if odd():
        monkeypatch.setattr(NcclTransport, "_reduce", interrupted)


def launched_by_the_others() -> Any:
    work = dist.all_reduce(mine(), async_op=True)
    work.wait()
    MPI.COMM_WORLD.send(None, ODD, tag=TAG)
    return work


@over_nccl
def test_a_cell_does_not_end_with_a_call_that_the_gpu_cannot_end(monkeypatch):
    dist.all_reduce(mine())
    works: list[Any] = []

    def cell() -> None:
        left_before_the_launch(monkeypatch)
        with fake.torch_stream(cupy.cuda.Stream(non_blocking=True)):
            works.append(launched_by_the_others())
            c.world.current().settle()

    error = in_a_cell(cell)
    assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    for work in works:
        # In a later cell it has no result either.
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(StaleHandle, match=r"has not ended all_reduce.*cell has failed"):
            work.wait()


def test_without_cupy_the_error_names_torchs_own_nccl(monkeypatch):
    monkeypatch.setattr(cuda.cupy_api, "load", Mock(side_effect=MissingDependency("no cupy")))
    with pytest.raises(MissingDependency, match=r"no cupy\n.*--torch nccl"):
        dist.all_reduce(mine())


@over_nccl
@pytest.mark.parametrize("copies", [False, True])
def test_a_wait_in_cuda_for_such_a_call_ends(copies, monkeypatch):
    """The main thread hears nothing there; another thread looks. In a copy to the host, the main
    thread keeps a lock without which no other thread records an event.
    """
    dist.all_reduce(mine())
    copied, record = threading.Event(), cupy.cuda.Event.record

    def record_behind_a_copy(*args: Any) -> None:
        if threading.current_thread() in watches:
            copied.wait()
        record(*args)

    def cell() -> None:
        left_before_the_launch(monkeypatch)
        stream = cupy.cuda.Stream(non_blocking=True)
        with fake.torch_stream(stream):
            launched_by_the_others()
            # It waits for the rank that has left; its arrays are held behind events.
            dist.all_reduce(mine(), async_op=True)
            watches.append(threading.Thread(target=look))
            watches[0].start()
            with stream:
                _queue.finish()  # as torch's item(): in C++
            copied.set()
            watches[0].join()
            dist.all_reduce(mine())

    def look() -> None:
        for looks in itertools.count():
            if this.lost is not None:
                return
            this.look_at_queued(looks / 100)

    this, watches = c.world.current(), list[threading.Thread]()
    if copies:
        monkeypatch.setattr(cupy.cuda.Event, "record", record_behind_a_copy)
        if odd():  # that of one member may end the calls of the others
            monkeypatch.setattr(this.gpu.aborts, "abort", lambda: None)
    error = in_a_cell(cell)
    monkeypatch.undo()
    assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    if not odd():
        # The other one may have found it first, and given up the call.
        assert re.search("rank (1 has left|. has given up)", str(error))


def trained(**options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = nn.parallel.DistributedDataParallel(net, **options)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), RANK + step + 1.0)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_model_in_ddp_has_the_same_parameters_on_all_ranks():
    first = trained(bucket_cap_mb=0.01)
    others = [trained(find_unused_parameters=True), trained(static_graph=True)]
    dist.all_gather(found := [torch.zeros_like(first) for _ in range(SIZE)], first)
    assert all(torch.allclose(first, other, atol=1e-6) for other in (*others, *found))


@over_nccl
def test_buckets_are_launched_while_backward_goes_on(monkeypatch):
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(40, 40) for _ in range(6)])
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    seen: list[int] = []

    def note(*_: object) -> None:
        # Of the first layer, which is the last in the pass.
        this = c.world.current()
        until(lambda: this.progress() is None and len(nccl.launched) > before)
        seen.append(len(nccl.launched))

    # The first pass has one bucket.
    model(torch.ones(2, 40)).sum().backward()
    before = len(nccl.launched)
    net[0].register_full_backward_pre_hook(note)
    model(torch.ones(2, 40, requires_grad=True)).sum().backward()
    assert len(seen) == 1
