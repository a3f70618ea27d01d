"""What the transports of GPUs promise beside the contract: who is chosen, and how calls are left.

Runs on GPUs, and where there are none on the FAKE cupy of tests/fakes; tests that break something
on purpose need the fake.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import in_a_cell, interrupted_after, odd
from gpus import FAKE, cupy, fake_only, host, ones

import allranks.collectives as c
from allranks.collectives.gpu import dlpack
from allranks.collectives.ops.keeping import VariableStore
from allranks.errors import CollectiveMismatch, RankLeft, TransportFailed, UsageError
from allranks.features.gpu import memory as gpu_memory

GPUS = len(os.environ.get("ALLRANKS_TEST_GPUS", "one").split(","))


def gpu_of(rank: int) -> int:
    """Which GPU a rank sits on: the fake's by the variable, the host's in turn."""
    return rank // int(os.environ.get("ALLRANKS_FAKE_GPU", "1")) if FAKE else rank % GPUS


SHARED = len({gpu_of(rank) for rank in range(c.size())}) < c.size()
"""True where ranks sit on one GPU."""

two = pytest.mark.skipif(c.size() < 2, reason="takes two ranks")
own_gpu = pytest.mark.skipif(SHARED, reason="NCCL needs a GPU for each rank")
one_host = pytest.mark.skipif(
    "ALLRANKS_RANKS_PER_HOST" in os.environ, reason="ranks of several hosts share no memory"
)
shares_gpu = pytest.mark.skipif(not SHARED, reason="needs two ranks on one GPU")


def next_cell_works() -> None:
    def cell() -> None:
        assert (host(c.allreduce(ones(), c.Sum)) == c.size()).all()
        assert c.allreduce(1, c.Sum) == c.size()

    assert in_a_cell(cell) is None


def launched() -> list[tuple]:
    from cupy.cuda import nccl

    return nccl.launched


@own_gpu
def test_ranks_with_a_gpu_each_use_nccl():
    c.allreduce(ones())
    assert c.records()[-1].transport == "nccl"


@shares_gpu
def test_ranks_on_one_gpu_are_staged():
    c.allreduce(ones())
    assert c.records()[-1].transport == "staged"


@shares_gpu
def test_nccl_on_a_shared_gpu_says_who_shares_it():
    before = c.epoch()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"ranks 0–\d share one GPU \(GPU-.*Leave transport="):
            c.allreduce(ones(), transport="nccl")
    assert not c.dirty()
    assert c.epoch() == before
    assert (host(c.allreduce(ones(), c.Sum)) == c.size()).all()


def test_a_process_set_chooses_for_itself(sets):
    if "half" not in sets:
        pytest.skip("takes two ranks")
    chosen = sets["half"]
    c.allreduce(ones(), process_set=chosen)
    alone = len({gpu_of(rank) for rank in chosen.ranks}) == chosen.size()
    assert c.records()[-1].transport == ("nccl" if alone else "staged")


def test_arrays_on_the_gpu_stay_there_and_keep_their_values():
    mine = cupy.asarray(np.arange(6.0).reshape(2, 3))
    found = c.allreduce(mine, c.Sum)
    assert (host(found) == np.arange(6.0).reshape(2, 3) * c.size()).all()
    assert (host(mine) == np.arange(6.0).reshape(2, 3)).all()
    assert found.data.ptr != mine.data.ptr


@pytest.mark.parametrize("transport", [None, "staged"])
def test_any_layout_works(transport):
    whole = cupy.asarray(np.arange(24.0).reshape(4, 6))
    for mine in (whole.T, whole[::2], whole[:, 1], whole[1], whole[:0]):
        found = c.allreduce(mine, c.Sum, transport=transport)
        np.testing.assert_array_equal(host(found), cupy.asnumpy(mine) * c.size())


@pytest.mark.parametrize("transport", [None, "staged"])
@pytest.mark.parametrize("count", [(4 << 18) - 1, 4 << 18, (4 << 18) + 1, 3_500_001])
def test_blocks_of_every_length_come_together(transport, count):
    mine = cupy.asarray(np.arange(count, dtype="float32") + c.rank())
    wanted = np.arange(count, dtype="float32") * c.size() + sum(range(c.size()))
    np.testing.assert_allclose(
        host(c.allreduce(mine, c.Sum, transport=transport)), wanted, rtol=1e-6
    )
    gathered = host(c.allgather(mine[: count - c.rank()], transport=transport))
    assert len(gathered) == sum(count - r for r in range(c.size()))
    assert gathered[-1] == count - c.size() + c.size() - 1
    assert (
        host(c.broadcast(mine, c.size() - 1, transport=transport))[:2] - c.size() == (-1, 0)
    ).all()


def test_work_queued_before_a_call_is_done_before_it():
    mine = ones(100_000)
    for _ in range(10):
        mine = mine * 2.0
    assert (host(c.allreduce(mine, c.Sum)) == 1024 * c.size()).all()
    assert (host(c.broadcast(mine * 2.0)) == 2048).all()


def test_handles_of_several_groups_go_on_side_by_side(sets):
    posted = [
        c.allreduce_async(ones(2_000_000) * float(i), c.Sum, process_set=chosen, transport=way)
        for i in range(3)
        for chosen in sets.values()
        for way in (None, "staged")
    ]
    for index, handle in enumerate(posted):
        chosen = list(sets.values())[index // 2 % len(sets)]
        members = c.size() if chosen is None else chosen.size()
        assert (host(handle.synchronize()) == index // 2 // len(sets) * members).all()


def test_a_device_says_where_an_array_goes():
    found = c.allreduce(ones(), c.Sum, device="/cpu:0")
    assert (host(found) == c.size()).all()
    assert c.records()[-1].transport in ("shared", "hosts", "mpi")
    found = c.allreduce(np.ones(3), c.Sum, device="/gpu:0")
    assert type(found) is np.ndarray
    assert (found == c.size()).all()
    assert c.records()[-1].transport in ("nccl", "staged")
    for call in (c.broadcast, c.allgather, c.reducescatter, c.reduce, c.gather):
        call(ones(c.size()), device="/cpu:0")
        assert c.records()[-1].transport in ("shared", "hosts", "mpi")
    with pytest.raises(UsageError, match=r"'/cpu:0' or '/gpu:0'.*found 'tpu'"):
        c.allreduce(ones(), device="tpu")
    with pytest.raises(UsageError, match="one place for its arrays"):
        c.allreduce(ones(), device="/cpu:0", transport="staged")


@pytest.mark.parametrize("said", ["mpi", "staged", "MPI"])
def test_the_environment_chooses_for_allreduce(said, monkeypatch):
    monkeypatch.setenv("ALLRANKS_ALLREDUCE", said)
    found = c.allreduce(ones(), c.Sum)
    assert (host(found) == c.size()).all()
    assert c.records()[-1].transport == said.lower()
    c.allreduce(np.ones(3))
    assert c.records()[-1].transport in ("shared", "hosts", "mpi")
    c.allreduce(ones(), transport="staged")
    assert c.records()[-1].transport == "staged"


def test_the_environment_is_told_what_it_may_say(monkeypatch):
    monkeypatch.setenv("ALLRANKS_ALLREDUCE", "gloo")
    with pytest.raises(UsageError, match="nccl, staged or mpi: found 'gloo'"):
        c.allreduce(ones())


def test_a_host_array_is_refused_by_a_transport_of_gpus():
    for transport in ("nccl", "staged"):
        with pytest.raises(
            UsageError, match=r"found one in host memory \(ndarray\)\. Pass cupy\.asarray"
        ):
            c.allreduce(np.ones(3), transport=transport)


def test_a_group_of_both_kinds_moves_on_the_gpu():
    first, second = c.grouped_allreduce([ones(), np.ones(3)], c.Sum)
    assert (host(first) == c.size()).all()
    assert type(second) is np.ndarray
    assert (second == c.size()).all()
    assert c.records()[-1].transport in ("nccl", "staged")


def test_adasum_goes_through_the_host():
    if c.size() & (c.size() - 1) == 0:
        assert (host(c.allreduce(ones(), c.Adasum)) == 1).all()
        assert c.records()[-1].transport in ("shared", "hosts", "mpi")


def test_scatter_gives_each_rank_the_kind_it_brought():
    mine = cupy.asarray(np.arange(2.0 * c.size())) if c.rank() == 0 else None
    found = c.scatter(mine)
    assert isinstance(found, cupy.ndarray) == (c.rank() == 0)
    assert (cupy.asnumpy(found) == np.arange(2.0) + 2 * c.rank()).all()
    found = c.scatter(mine, transport="staged")
    assert (host(found) == np.arange(2.0) + 2 * c.rank()).all()
    found = c.scatter(mine if c.rank() == 0 else cupy.asarray(np.empty(0)))
    assert (host(found) == np.arange(2.0) + 2 * c.rank()).all()


@own_gpu
def test_the_gpus_own_clock_times_a_transfer():
    c.allreduce(ones(500_000), c.Sum)
    record = c.records()[-1]
    assert record.device_seconds is not None
    assert 0 < record.transfer_seconds == record.device_seconds < record.ended - record.arrived
    c.allreduce(ones(), transport="staged")
    assert c.records()[-1].device_seconds is None


@two
def test_host_and_gpu_arrays_of_one_call_are_a_mismatch():
    error = in_a_cell(lambda: c.allreduce(np.ones(4, "float32") if odd() else ones()))
    assert isinstance(error, CollectiveMismatch)
    assert "needs the same kind of memory on every rank" in str(error)
    assert "rank 1 has one in host memory" in str(error)
    next_cell_works()


MISMATCHES = {
    "shape": lambda: c.allreduce(ones(4 if odd() else 5)),
    "dtype": lambda: c.allreduce(ones(4, "float32" if odd() else "float64")),
    "operation": lambda: c.broadcast(ones()) if odd() else c.allreduce(ones()),
    "transport": lambda: c.allreduce(ones(), transport="staged" if odd() else None),
}


@two
@pytest.mark.parametrize("what", MISMATCHES)
def test_a_difference_is_named_before_anything_is_launched(what):
    next_cell_works()
    before = len(launched()) if FAKE else 0
    error = in_a_cell(MISMATCHES[what])
    assert isinstance(error, CollectiveMismatch)
    assert f"needs the same {what}" in str(error)
    if FAKE:
        assert len(launched()) == before
    next_cell_works()


WAITING = {
    "small": lambda: c.allreduce(ones()),
    "large": lambda: c.allreduce(ones(3_000_000)),
    "broadcast": lambda: c.broadcast(ones()),
    "staged": lambda: c.allreduce(ones(3_000_000), transport="staged"),
    "handle": lambda: c.allreduce_async(ones()).synchronize(),
}


@two
@pytest.mark.parametrize("what", WAITING)
def test_a_rank_that_left_is_named_and_the_next_cell_works(what):
    for _ in range(3):
        error = in_a_cell(lambda: None if odd() else WAITING[what]())
        assert isinstance(error, type(None) if odd() else RankLeft)
        assert odd() or "rank 1 has left this cell" in str(error)
        next_cell_works()


@two
def test_an_interrupt_at_any_moment_leaves_the_next_cell_whole():
    def busy() -> None:
        with interrupted_after(0.02 + 0.05 * np.random.default_rng().random()):
            while True:
                c.allreduce(ones())
                c.allreduce(ones(1_500_000), c.Sum, transport="staged")
                c.allgather(ones(1 + c.rank()))
                c.allreduce(ones(100, "float16"), c.Sum)

    for _ in range(6):
        assert isinstance(in_a_cell(busy), KeyboardInterrupt | RankLeft)
        next_cell_works()


def test_every_epoch_has_a_communicator_of_its_own():
    if SHARED and c.size() > 1:
        pytest.skip("NCCL needs a GPU for each rank")

    c.allreduce(ones())
    first = c.world.current().groups[0].gpu
    c.allreduce(ones())
    assert c.world.current().groups[0].gpu is first
    c.renew()
    c.allreduce(ones())
    assert c.world.current().groups[0].gpu is not first


@fake_only
@own_gpu
@two
def test_one_communicator_serves_a_group_for_its_epoch():
    from cupy.cuda import nccl

    c.renew()
    before = len(nccl.aborted)
    for _ in range(5):
        c.allreduce(ones())
    assert len(nccl.aborted) == before
    c.renew()
    assert len(nccl.aborted) == before + 1


@fake_only
@own_gpu
def test_what_goes_over_the_wire():
    size, calls = c.size(), launched()

    def made(call) -> list[tuple]:
        calls.clear()
        call()
        return list(calls)

    def of(dtype: str) -> Any:
        return cupy.asarray(np.ones(6, dtype))

    c.allreduce(ones())
    assert made(lambda: c.allreduce(of("float32"), c.Sum)) == [("allReduce", 6, 7, 0)]
    assert made(lambda: c.allreduce(of("int16"), c.Max)) == [("allReduce", 6, 2, 2)]
    assert made(lambda: c.allreduce(of("uint16"), c.Product)) == [("allReduce", 6, 3, 1)]
    assert made(lambda: c.allreduce(of("complex64"), c.Sum)) == [("allReduce", 12, 7, 0)]
    assert made(lambda: c.allreduce(of("bool"), c.Sum)) == [("allReduce", 6, 1, 2)]
    assert made(lambda: c.allreduce(of("bool"), c.Product)) == [("allReduce", 6, 1, 3)]
    assert made(lambda: c.broadcast(of("float64"))) == [("broadcast", 48, 1, -1)]
    assert made(lambda: c.allgather(of("int8"))) == [("allGather", 6, 1, -1)]
    assert made(lambda: c.allreduce(cupy.asarray(np.empty(0)))) == []
    # As many bytes as a ring moves, in the precision that came.
    half = made(lambda: c.allreduce(of("float16"), c.Sum))
    assert {name for name, *_ in half} <= {"send", "recv"}
    sent = sum(count for name, count, *_ in half if name == "send")
    parts = [6 * (i + 1) // size - 6 * i // size for i in range(size)]
    assert sent == 2 * (6 - parts[c.rank()]) + 2 * (size - 1) * parts[c.rank()]
    even = cupy.asarray(np.ones(2 * size, "float32"))
    assert made(lambda: c.reducescatter(even, c.Sum)) == [("reduceScatter", 2, 7, 0)]


@fake_only
@own_gpu
@two
@pytest.mark.parametrize("result", [2, 8])
def test_a_failure_of_nccl_is_told_and_mended(result):
    """Also one that the binding has no text for, as it has none for "in progress"."""
    from cupy.cuda import nccl

    next_cell_works()

    def fails() -> None:
        if odd():
            nccl.broken.append(result)
        c.allreduce(ones(2_000_000))

    error = in_a_cell(fails)
    nccl.broken.clear()
    if odd():
        assert isinstance(error, TransportFailed)
        assert re.search(r"NCCL has failed: (NCCL_ERROR_SYSTEM_|NCCL returned .*8)", str(error))
    else:
        assert isinstance(error, RankLeft | type(None))
    next_cell_works()


@fake_only
def test_a_gpu_that_has_failed_is_told():
    from cupy.cuda import runtime

    next_cell_works()
    runtime.failing.append("cudaErrorIllegalAddress: an illegal memory access was encountered")
    try:
        with pytest.raises(TransportFailed, match="a GPU that works, and CUDA says cudaErrorIlle"):
            c.allreduce(ones())
    finally:
        runtime.failing.clear()
    c.barrier() if not c.dirty() else None
    c.renew()
    next_cell_works()


class Late:
    """An array of a library that reads memory on a stream of its own, late, and keeps nothing."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array_namespace__(self) -> type[Late]:
        return Late

    @staticmethod
    def from_dlpack(array: Any) -> Late:
        return Late(array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def _as_cupy(self) -> Any:
        return self.array

    def read_on(self, stream: Any, into: np.ndarray) -> None:
        """A kernel on another stream, which is given an address."""
        from cupy.cuda import runtime

        at = self.array.data.ptr
        runtime.memcpyAsync(into.ctypes.data, at, into.nbytes, 2, stream.ptr)


@fake_only
@pytest.mark.parametrize("captures", [False, True])
def test_memory_of_a_result_that_another_stream_reads_is_not_used_again(captures, monkeypatch):
    """Nor where CUDA refuses to wait for it, while a graph is captured."""
    if captures:
        monkeypatch.setattr(cupy.cuda.runtime, "capturing", [900])
    stream, gate = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    stream.wait_event(gate)
    came = np.zeros(5000, "float32")
    found = c.allreduce(Late(ones(5000)), c.Sum)
    assert type(found) is Late
    found.read_on(stream, came)
    del found
    assert not dlpack.wait_for_exports(0.2)
    for _ in range(5):
        c.allreduce(Late(ones(5000) * 7.0), c.Sum)
    gate.record(stream=None)
    monkeypatch.undo()
    cupy.cuda.runtime.deviceSynchronize()
    assert (came == c.size()).all()


@fake_only
def test_a_failed_cell_gives_back_what_another_library_dropped(monkeypatch):
    class Pool:
        free_all_blocks = staticmethod(lambda: free.append(where in addresses()))

    def addresses() -> set[int]:
        from cupy.cuda import _memory

        return {block.ctypes.data for blocks in _memory._free.values() for block in blocks}

    free: list[bool] = []
    for name in ("get_default_memory_pool", "get_default_pinned_memory_pool"):
        monkeypatch.setattr(cupy, name, Pool, raising=False)
    stream, gate = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    stream.wait_event(gate)
    came = np.zeros(5000, "float32")
    found = c.allreduce(Late(ones(5000)), c.Sum)
    where = found.array.data.ptr
    found.read_on(stream, came)
    opens = threading.Timer(0.2, gate.record)
    opens.start()

    def fails(held: object) -> None:
        raise ValueError("after the call")

    try:
        fails(found)
    except ValueError as error:
        del found
        gpu_memory.release(error)
    opens.join()
    assert free == [True, True]


@fake_only
@own_gpu
@two
@pytest.mark.parametrize("slow", ["slow_seconds", "slow_pairs"])
def test_connecting_can_be_left(slow):
    """Its communicator is freed only when the thread that connects has ended."""
    from cupy.cuda import nccl

    c.renew()

    def cell() -> None:
        if odd():
            getattr(nccl, slow).append(1.0)
            with interrupted_after(0.3):
                c.allreduce(ones())
        else:
            c.allreduce(ones())

    began = time.monotonic()
    error = in_a_cell(cell)
    assert time.monotonic() - began < 60
    assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    next_cell_works()


def forget_blocks() -> Any:
    """This rank's GPU, without pinned blocks."""
    c.allreduce(ones())
    gpu = c.world.current().gpu
    assert gpu is not None
    c.renew()
    for number in list(gpu.blocks):
        gpu.forget(number)
    return gpu


@fake_only
@one_host
def test_memory_that_cannot_be_pinned_is_replaced_and_it_is_said(monkeypatch):
    forget_blocks()
    without = odd() or c.size() == 1
    if without:
        monkeypatch.setenv("ALLRANKS_FAKE_PIN", "no")
    said: list[str] = []
    monkeypatch.setattr(c.world.current(), "notice", said.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = c.allreduce(ones(3_000_000), c.Sum, transport="staged")
    assert (host(found) == c.size()).all()
    assert len(said) == without
    assert all("memory that this rank has alone" in each for each in said)
    forget_blocks()


@fake_only
@one_host
def test_groups_pin_pages_of_their_own_and_give_them_back(sets, monkeypatch):
    from cupy.cuda import runtime

    gpu = forget_blocks()
    before = list(runtime.registered)
    said: list[str] = []
    monkeypatch.setattr(c.world.current(), "notice", said.append)
    for chosen in sets.values():
        c.allreduce(ones(), transport="staged", process_set=chosen)
    assert said == []
    pinned = [each for each in runtime.registered if each not in before]
    assert len(pinned) == len(gpu.blocks) == len(sets)
    assert all(at % 4096 == nbytes % 4096 == 0 for at, nbytes in pinned)
    forget_blocks()
    assert runtime.registered == before


@fake_only
@one_host
@two
def test_pinned_memory_that_a_call_left_is_given_back_once_the_gpu_is_through():
    from cupy.cuda import runtime

    gpu = forget_blocks()
    before = list(runtime.registered)
    gate = cupy.cuda.Event()

    def pinned() -> bool:
        return bool(runtime.registered != before)

    def left() -> None:
        cupy.cuda.get_current_stream().wait_event(gate)
        with interrupted_after(0.3, pinned) if odd() else nullcontext():
            c.allreduce(ones(3_000_000), c.Sum, transport="staged")

    error = in_a_cell(left)
    assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    for number in list(gpu.blocks):
        gpu.forget(number)
    assert runtime.registered != before
    gate.record(cupy.cuda.Stream(non_blocking=True))
    cupy.cuda.runtime.deviceSynchronize()
    next_cell_works()
    in_use = {memory.ctypes.data for memory in gpu.blocks.values()}
    assert [each for each in runtime.registered if each[0] not in in_use] == before


def counted() -> Any:
    """What the fake has counted since it was cleared last."""
    from cupy.cuda import _queue

    return _queue.counted


@fake_only
@pytest.mark.parametrize("transport", [None, "staged"])
def test_what_came_in_one_piece_is_not_copied_again(transport):
    me, size = c.rank(), c.size()
    mine = cupy.asarray(np.full((me + 1, 3), float(me)))
    wanted = np.concatenate([np.full((r + 1, 3), float(r)) for r in range(size)])
    counted().clear()
    gathered = c.allgather(mine, transport=transport)
    (again,) = c.grouped_allgather([mine], transport=transport)
    at_root = c.gather(mine, size - 1, transport=transport)
    exchanged = c.alltoall(cupy.asarray(np.full((size, 3), float(me))), transport=transport)
    assert counted()["concatenate"] == 0
    for found in (gathered, again):
        np.testing.assert_array_equal(host(found), wanted)
    if me == size - 1:
        np.testing.assert_array_equal(host(at_root), wanted)
    np.testing.assert_array_equal(host(exchanged)[:, 0], np.arange(float(size)))


@fake_only
@pytest.mark.parametrize("transport", [None, "staged"])
def test_calls_use_events_that_are_there(transport):
    def calls() -> None:
        for _ in range(3):
            c.allreduce(ones(3_000_000), c.Sum, transport=transport)
            c.allreduce(ones(9, "float16"), c.Sum, transport=transport)
            c.grouped_allreduce([ones(), ones(5)], c.Sum, transport=transport)
            c.broadcast(ones(), transport=transport)
            c.allgather(ones(1 + c.rank()), transport=transport)
            found = c.alltoall(ones(c.size()), transport=transport)
            assert (host(found) == 1).all()

    calls()
    counted().clear()
    calls()
    assert counted()["event"] == 0
    assert counted()["wait"] > 0


@fake_only
@two
@pytest.mark.parametrize("transport", [None, "staged"])
def test_events_of_a_call_that_was_left_mark_nothing_else(transport, monkeypatch):
    next_cell_works()
    gpu, gate = c.world.current().gpu, cupy.cuda.Event()
    assert gpu is not None
    awaited: list[tuple[Any, Any]] = []
    wait = gpu.wait

    def note(event: Any, *arguments: Any) -> Any:
        awaited.append((event, event.mark))
        if odd():
            raise KeyboardInterrupt
        return wait(event, *arguments)

    def left() -> None:
        cupy.cuda.get_current_stream().wait_event(gate)
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "wait", note)
            c.allreduce(ones(), c.Sum, transport=transport)

    try:
        error = in_a_cell(left)
        spare = [event for events in gpu.events._spare.values() for event in events]
    finally:
        gate.record(cupy.cuda.Stream(non_blocking=True))
        cupy.cuda.runtime.deviceSynchronize()
    assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    assert awaited or not odd()
    assert all(event not in spare and event.mark is mark for event, mark in awaited)
    next_cell_works()


@fake_only
@pytest.mark.parametrize("transport", [None, "staged"])
@pytest.mark.parametrize("dtype", ["float32", "int16", "float16", "complex64"])
def test_many_arrays_are_laid_out_in_one_copy(dtype, transport):
    shapes = [(), (0,), (3, 5), (2, 0), (64,), (7,), (1,), (300,), (2, 2, 2), (65,), (128,), (5,)]
    mine = [cupy.asarray(np.full(shape, n, dtype)) for n, shape in enumerate(shapes)]
    mine += [cupy.asarray(np.arange(6).reshape(2, 3).astype(dtype)).T, ones(4, "float64")]
    counted().clear()
    found = c.grouped_allreduce(mine, c.Sum, prescale_factor=2.0, transport=transport)
    assert counted()["concatenate"] == 1
    if dtype == "float32":
        assert counted()["copyto"] == 0
    for one, source in zip(found, mine, strict=True):
        assert one.dtype == source.dtype
        np.testing.assert_array_equal(host(one), host(source) * 2 * c.size())


class Tensor:
    """An array of a library that reads memory as it is, on a stream that cupy knows nothing of."""

    __module__ = "tensorflow"
    backing_device = "/GPU:0"
    dtype = SimpleNamespace(is_floating=True, is_integer=False)

    def __init__(self, array: Any) -> None:
        self.array, self.values = array, array._raw.copy()
        assert array.data.ptr % dlpack.ALIGNED == 0


@fake_only
@pytest.mark.parametrize("transport", [None, "staged"])
def test_tensors_of_one_call_are_waited_for_once(transport, monkeypatch):
    """Those of a library that takes what it is given as ready."""
    dlpack = SimpleNamespace(to_dlpack=lambda tensor: tensor.array, from_dlpack=Tensor)
    library = SimpleNamespace(
        Variable=type("Variable", (), {}),
        convert_to_tensor=lambda value: value,
        experimental=SimpleNamespace(dlpack=dlpack),
    )
    monkeypatch.setitem(sys.modules, "tensorflow", library)

    def waits(count: int) -> int:
        mine = [Tensor(cupy.empty_like(ones(n))) for n in range(1, count + 1)]
        for tensor in mine:
            tensor.array = ones(tensor.array.size) * 3.0
        counted().clear()
        found = c.grouped_allreduce(mine, c.Average, transport=transport)
        made = counted()["wait"]
        assert counted()["copy"] == 0
        assert all(type(each) is Tensor and (each.values == 3).all() for each in found)
        assert [each.values.size for each in found] == list(range(1, count + 1))
        return made

    waits(1)
    assert waits(20) == waits(1)
    halves = Tensor(cupy.empty_like(ones(5)))
    halves.array = ones(5) * 3.0
    found = c.allreduce(halves, c.Average, compression=c.Compression.fp16, transport=transport)
    assert (found.values == 3).all()


@fake_only
def test_the_fake_refuses_to_become_numpys():
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(ones())


@one_host
def test_what_is_kept_of_a_gpu_is_as_it_is_when_its_work_is_done(tmp_path, monkeypatch):
    this = c.world.current()
    folder = c.broadcast_object(str(tmp_path))
    weights = cupy.asarray(np.arange(3.0) + c.rank())
    names = {"weights": weights}
    monkeypatch.setattr(
        this, "variable_store", VariableStore((folder,), c.rank(), c.size(), names), raising=False
    )
    for _ in range(5):
        weights = weights * 2
    names["weights"] = weights
    c.keep("weights", model={"same": weights}, step=5)
    np.multiply(weights, 0, out=weights)  # what is kept is a copy
    assert not this.variable_store.of_cells.settle()
    c.barrier()
    _, values = this.variable_store.of_cells.load()
    assert values["model"]["same"] is values["weights"]
    assert (host(values["weights"]) == 32 * (np.arange(3) + c.rank())).all()
    assert (host(weights) == 0).all()
