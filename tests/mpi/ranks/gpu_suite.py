"""What the transports of GPUs promise beside the contract: who is chosen, and how calls are left.

Runs on GPUs, and where there are none on the FAKE cupy of tests/fakes; tests that break something
on purpose need the fake.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import PATIENCE_SECONDS, in_a_cell, interrupted_after, odd
from gpus import FAKE, cupy, fake_only, host, ones

import allranks.collectives as c
from allranks.collectives.gpu import dlpack
from allranks.collectives.gpu.staged import StagedTransport
from allranks.collectives.ops.keeping import VariableStore
from allranks.collectives.timings import Totals
from allranks.errors import CollectiveMismatch, RankLeft, TransportFailed, UsageError
from allranks.features.gpu import memory as gpu_memory

if FAKE:
    from cupy.cuda import _memory, _queue, nccl, runtime

GPUS = len(os.environ.get("ALLRANKS_TEST_GPUS", "one").split(","))
SIZE, RANK = c.size(), c.rank()
IN_HOST_MEMORY = ("shared", "hosts", "mpi")


def gpu_of(rank: int) -> int:
    """Which GPU a rank sits on: the fake's by the variable, the host's in turn."""
    return rank // int(os.environ.get("ALLRANKS_FAKE_GPU", "1")) if FAKE else rank % GPUS


SHARED = len({gpu_of(rank) for rank in range(SIZE)}) < SIZE
"""True where ranks sit on one GPU."""

two = pytest.mark.skipif(SIZE < 2, reason="takes two ranks")
own_gpu = pytest.mark.skipif(SHARED, reason="NCCL needs a GPU for each rank")
one_host = pytest.mark.skipif(
    "ALLRANKS_RANKS_PER_HOST" in os.environ, reason="ranks of several hosts share no memory"
)
shares_gpu = pytest.mark.skipif(not SHARED, reason="needs two ranks on one GPU")
ONE_GPU = len({gpu_of(rank) for rank in range(SIZE)}) == 1
ALSO = ["ipc"] if ONE_GPU else []
"""The transport of ranks that all share one GPU."""
each_way = pytest.mark.parametrize("transport", [None, "staged", *ALSO])


def next_cell_works() -> None:
    def cell() -> None:
        assert (host(c.allreduce(ones(), c.Sum)) == SIZE).all()
        assert c.allreduce(1, c.Sum) == SIZE

    assert in_a_cell(cell) is None


def moved_by() -> str:
    """The transport of the last call."""
    return c.records()[-1].transport


def opened(gate: Any) -> None:
    """Lets what waits for an event of the fake go on, to its end."""
    gate.record(cupy.cuda.Stream(non_blocking=True))
    runtime.deviceSynchronize()


@pytest.mark.skipif(ONE_GPU, reason="all ranks share one GPU")
def test_ranks_that_do_not_share_one_gpu_have_no_memory_on_it_to_share():
    before = c.epoch()
    with pytest.raises(
        UsageError, match=r"share one GPU: rank.* and .* use different ones\. Leave"
    ):
        c.allreduce(ones(), transport="ipc")
    assert not c.dirty()
    assert c.epoch() == before
    assert (host(c.allreduce(ones(), c.Sum)) == SIZE).all()


@shares_gpu
def test_nccl_on_a_shared_gpu_says_who_shares_it():
    before = c.epoch()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"ranks 0–\d share one GPU \(GPU-.*Leave transport="):
            c.allreduce(ones(), transport="nccl")
    assert not c.dirty()
    assert c.epoch() == before
    assert (host(c.allreduce(ones(), c.Sum)) == SIZE).all()


def test_ranks_with_a_gpu_each_use_nccl_and_a_process_set_chooses_for_itself(sets):
    for chosen in sets.values():
        c.allreduce(ones(), process_set=chosen)
        ranks = range(SIZE) if chosen is None else chosen.ranks
        alone = len({gpu_of(rank) for rank in ranks}) == len(ranks)
        assert moved_by() == ("nccl" if alone else "staged")


@each_way
def test_any_layout_works_and_stays_as_it_is(transport):
    whole = cupy.asarray(np.arange(24.0).reshape(4, 6))
    for mine in (whole, whole.T, whole[::2], whole[:, 1], whole[1], whole[:0]):
        brought = cupy.asnumpy(mine)
        found = c.allreduce(mine, c.Sum, transport=transport)
        np.testing.assert_array_equal(host(found), brought * SIZE)
        np.testing.assert_array_equal(cupy.asnumpy(mine), brought)
        assert not mine.size or found.data.ptr != mine.data.ptr


@each_way
@pytest.mark.parametrize("count", [(4 << 18) - 1, 4 << 18, (4 << 18) + 1, 3_500_001])
def test_blocks_of_every_length_come_together(transport, count):
    mine = cupy.asarray(np.arange(count, dtype="float32") + RANK)
    wanted = np.arange(count, dtype="float32") * SIZE + sum(range(SIZE))
    found = host(c.allreduce(mine, c.Sum, transport=transport))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    gathered = host(c.allgather(mine[: count - RANK], transport=transport))
    assert len(gathered) == sum(count - r for r in range(SIZE))
    assert gathered[-1] == count - 1
    rooted = host(c.broadcast(mine, SIZE - 1, transport=transport))
    assert (rooted[:2] - SIZE == (-1, 0)).all()


def test_work_queued_before_a_call_is_done_before_it():
    mine = ones(100_000)
    for _ in range(10):
        mine = mine * 2.0
    assert (host(c.allreduce(mine, c.Sum)) == 1024 * SIZE).all()
    assert (host(c.broadcast(mine * 2.0)) == 2048).all()


@each_way
def test_repeated_calls_follow_the_stream_of_each(transport):
    """Also while a posted call is under way."""
    streams = nullcontext(), cupy.cuda.Stream(non_blocking=True)
    for turn in range(8):
        with streams[turn % 2]:
            posted = c.allreduce_async(ones(100_000), transport=transport) if turn > 3 else None
            mine = ones(100_000)
            for _ in range(10):
                mine = mine * 2.0
            found = c.allreduce(mine, c.Sum, transport=transport)
            assert (host(found) == 1024 * SIZE).all()
            if posted is not None:
                assert (host(posted.synchronize()) == 1).all()


def test_a_call_beside_posted_ones_is_marked_in_its_own_thread(monkeypatch):
    """It begins later, perhaps while another thread drives all calls, on another stream."""
    gpu, marked = c.world.current().gpu, []
    mark = gpu.marked
    monkeypatch.setattr(gpu, "marked", lambda call: marked.append(call.name) or mark(call))
    posted = c.allreduce_async(ones(), name="posted")
    c.allreduce(ones(), name="beside")
    posted.synchronize()
    assert marked == ["posted", "beside"]


@each_way
@pytest.mark.parametrize("dtype", ["float32", "int16", "float16"])
def test_a_result_goes_to_the_array_that_is_given(transport, dtype):
    whole = cupy.asarray(np.zeros(20, dtype))
    for _ in range(2):
        mine, out = ones(9, dtype), whole[3:12]
        assert c.allreduce(mine, c.Sum, transport=transport, out=out) is out
        assert (host(mine) == 1).all()
        assert c.allreduce(mine, c.Sum, transport=transport, out=mine) is mine
        assert (host(mine) == SIZE).all()
    posted = c.allreduce_async(out, c.Sum, transport=transport, out=out)
    assert posted.synchronize() is out
    wanted = np.zeros(20)
    wanted[3:12] = SIZE * SIZE
    assert (host(whole) == wanted).all()


@each_way
def test_a_result_is_copied_to_what_no_transport_of_gpus_writes_to(transport):
    mine, out = ones(6), cupy.asarray(np.zeros((6, 2), "float32"))[:, 1]
    fp16 = {"compression": c.Compression.fp16, "out": ones(6)}
    for options in ({"out": out}, fp16):
        assert c.allreduce(mine, c.Sum, transport=transport, **options) is options["out"]
        assert (cupy.asnumpy(options["out"]) == SIZE).all()
    out = ones(6)
    assert c.allreduce(mine, c.Sum, device="/cpu:0", out=out) is out
    assert (host(out) == SIZE).all()
    on_host = np.ones(3)
    assert c.allreduce(on_host, c.Sum, device="/gpu:0", out=on_host) is on_host
    assert (on_host == SIZE).all()


@fake_only
@each_way
def test_a_loop_with_an_out_allocates_nothing(transport, monkeypatch):
    mine, out = ones(500), ones(500)
    for _ in range(3):
        c.allreduce(mine, transport=transport, out=out)
        monkeypatch.setattr(_memory, "pooled", Mock(side_effect=MemoryError))
    assert (host(out) == 1).all()


def test_an_out_elsewhere_or_over_the_array_is_refused():
    whole = ones(8)
    wrong = {
        r"expected a cupy array of float32 \(4,\) on GPU \d, found a numpy": np.ones(4, "f4"),
        r"found a cupy array of float64 \(4,\)": ones(4, "float64"),
        r"found a cupy array of float32 \(5,\)": ones(5),
        "one that overlaps it": whole[1:5],
    }
    for said, out in wrong.items():
        with pytest.raises(UsageError, match=said):
            c.allreduce(whole[:4], c.Sum, out=out)
    assert (host(whole) == 1).all()
    assert (host(c.allreduce(whole[:4], c.Sum, out=whole[4:])) == SIZE).all()


def functions_of(call: Any) -> int:
    """The functions that a call passes, of Python's and C's; one of the fake's counts as one."""
    fake, passed, within = os.path.dirname(cupy.__file__), 0, 0

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal passed, within
        if event == "call":
            passed += not within
            within += bool(within or frame.f_code.co_filename.startswith(fake))
        elif event == "return":
            within -= bool(within)
        elif event == "c_call":
            passed += not within

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return passed


FIFTY = [ones() for _ in range(50)] if FAKE else []
REPEATED: dict[str, tuple[Any, int]] = {
    "nccl": (lambda mine, out: c.allreduce(mine, c.Sum, transport="nccl"), 85),
    "its own": (lambda mine, out: c.allreduce(mine, c.Average), 90),
    "out": (lambda mine, out: c.allreduce(mine, c.Sum, transport="nccl", out=out), 85),
    "in place": (lambda mine, out: c.allreduce(mine, c.Sum, transport="nccl", out=mine), 85),
    "staged": (lambda mine, out: c.allreduce(mine, c.Sum, transport="staged"), 185),
    "posted": (lambda mine, out: c.allreduce_async(mine, c.Sum).synchronize(), 200),
    "grouped": (lambda mine, out: c.grouped_allreduce(FIFTY, c.Sum, transport="nccl"), 760),
}
"""Calls, and the most functions that each takes."""


@fake_only
@pytest.mark.skipif(SIZE > 1, reason="how often a rank looks depends on the others")
@pytest.mark.parametrize("what", REPEATED)
def test_a_call_like_those_before_takes_few_functions(what, monkeypatch):
    def work() -> None:
        while any(stream._step() for stream in list(_queue._streams.values())):
            pass

    # The GPU is done at the first look, so that each call takes as many.
    monkeypatch.setattr(_queue, "progress", work)
    (call, most), mine, out = REPEATED[what], ones(1024), ones(1024)
    gc.disable()  # no finalizer of another test's is counted
    try:
        for _ in range(3):
            call(mine, out)
        assert max(functions_of(lambda: call(mine, out)) for _ in range(4)) <= most
    finally:
        gc.enable()


def test_a_device_says_where_an_array_goes():
    found = c.allreduce(ones(), c.Sum, device="/cpu:0")
    assert (host(found) == SIZE).all()
    assert moved_by() in IN_HOST_MEMORY
    found = c.allreduce(np.ones(3), c.Sum, device="/gpu:0")
    assert type(found) is np.ndarray
    assert (found == SIZE).all()
    assert moved_by() in ("nccl", "staged")
    for call in (c.broadcast, c.allgather, c.reducescatter, c.reduce, c.gather):
        call(ones(SIZE), device="/cpu:0")
        assert moved_by() in IN_HOST_MEMORY
    with pytest.raises(UsageError, match=r"'/cpu:0' or '/gpu:0'.*found 'tpu'"):
        c.allreduce(ones(), device="tpu")
    with pytest.raises(UsageError, match="one place for its arrays"):
        c.allreduce(ones(), device="/cpu:0", transport="staged")


@pytest.mark.parametrize("said", ["mpi", "staged", "MPI", "gloo"])
def test_the_environment_chooses_for_allreduce(said, monkeypatch):
    monkeypatch.setenv("ALLRANKS_ALLREDUCE", said)
    if said == "gloo":
        with pytest.raises(UsageError, match="nccl, staged, ipc or mpi: found 'gloo'"):
            c.allreduce(ones())
        return
    assert (host(c.allreduce(ones(), c.Sum)) == SIZE).all()
    assert moved_by() == said.lower()
    c.allreduce(np.ones(3))
    assert moved_by() in IN_HOST_MEMORY
    c.allreduce(ones(), transport="staged")
    assert moved_by() == "staged"


def test_arrays_in_host_memory_are_refused_by_a_transport_of_gpus_and_taken_into_groups():
    for transport in ("nccl", "staged", "ipc"):
        with pytest.raises(UsageError, match=r"found one in host memory \(ndarray\)\. Pass cupy\."):
            c.allreduce(np.ones(3), transport=transport)
    first, second = c.grouped_allreduce([ones(), np.ones(3)], c.Sum)
    assert moved_by() in ("nccl", "staged")
    assert (host(first) == SIZE).all()
    assert type(second) is np.ndarray
    assert (second == SIZE).all()


@pytest.mark.skipif(SIZE & (SIZE - 1) > 0, reason="Adasum needs a power of two")
def test_adasum_goes_through_the_host():
    assert (host(c.allreduce(ones(), c.Adasum)) == 1).all()
    assert moved_by() in IN_HOST_MEMORY


def test_scatter_gives_each_rank_the_kind_it_brought():
    mine = cupy.asarray(np.arange(2.0 * SIZE)) if RANK == 0 else None
    found = c.scatter(mine)
    assert isinstance(found, cupy.ndarray) == (RANK == 0)
    kinds = [
        host(c.scatter(mine, transport="staged")),
        host(c.scatter(mine if RANK == 0 else cupy.asarray(np.empty(0)))),
    ]
    for each in (cupy.asnumpy(found), *kinds):
        assert (each == np.arange(2.0) + 2 * RANK).all()


@own_gpu
def test_the_gpus_own_clock_times_a_transfer():
    totals = Totals()
    c.allreduce(ones(500_000), c.Sum)
    record = c.records()[-1]
    (sums,) = totals.changed()
    assert record.device_seconds is not None
    assert sums.transfer_seconds == sums.moving_seconds == record.device_seconds
    assert 0 < record.transfer_seconds == record.device_seconds < record.ended - record.arrived
    # Of a staged call, the clock times the copies from and to the GPU only.
    for count in (4, 3_000_000):
        c.allreduce(ones(count), transport="staged")
        record = c.records()[-1]
        assert record.device_seconds is not None
        assert record.device_seconds > 0
        assert record.transfer_seconds == record.ended - max(record.last_arrived, record.arrived)


MISMATCHES = {
    "shape": lambda: c.allreduce(ones(4 if odd() else 5)),
    "dtype": lambda: c.allreduce(ones(4, "float32" if odd() else "float64")),
    "operation": lambda: c.broadcast(ones()) if odd() else c.allreduce(ones()),
    "transport": lambda: c.allreduce(ones(), transport="staged" if odd() else None),
    "kind of memory": lambda: c.allreduce(np.ones(4, "float32") if odd() else ones()),
}


@two
@pytest.mark.parametrize("what", MISMATCHES)
def test_a_difference_is_named_before_anything_is_launched(what):
    next_cell_works()
    before = len(nccl.launched) if FAKE else 0
    error = in_a_cell(MISMATCHES[what])
    assert isinstance(error, CollectiveMismatch)
    assert f"needs the same {what} on every rank" in str(error)
    assert what != "kind of memory" or "rank 1 has one in host memory" in str(error)
    assert not FAKE or len(nccl.launched) == before
    next_cell_works()


WAITING = {
    "small": lambda: c.allreduce(ones()),
    "large": lambda: c.allreduce(ones(3_000_000)),
    "broadcast": lambda: c.broadcast(ones()),
    "staged": lambda: c.allreduce(ones(3_000_000), transport="staged"),
    "handle": lambda: c.allreduce_async(ones()).synchronize(),
} | {way: lambda: c.allreduce(ones(), transport="ipc") for way in ALSO}


@two
@pytest.mark.parametrize("what", WAITING)
def test_a_rank_that_left_is_named_and_the_next_cell_works(what):
    for _ in range(3):
        error = in_a_cell(lambda: None if odd() else WAITING[what]())
        assert isinstance(error, type(None) if odd() else RankLeft)
        assert odd() or "rank 1 has left this cell" in str(error)
        next_cell_works()


@two
def test_no_staged_call_has_a_result_once_a_rank_has_left_it(monkeypatch):
    """After all have agreed, and before that rank has moved its data."""
    next_cell_works()
    for move in (
        lambda: c.allreduce(ones(), c.Sum, transport="staged"),
        lambda: c.broadcast(ones(), 1, transport="staged"),
        lambda: c.allgather(ones(), transport="staged"),
        lambda: c.alltoall(ones(c.size()), transport="staged"),
        lambda: c.reducescatter(ones(c.size()), c.Sum, transport="staged"),
    ):
        with monkeypatch.context() as patches:
            if odd():
                patches.setattr(StagedTransport, "connect", Mock(side_effect=KeyboardInterrupt))
            error = in_a_cell(move)
        assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    next_cell_works()


@two
def test_an_interrupt_at_any_moment_leaves_the_next_cell_whole():
    def busy() -> None:
        with interrupted_after(0.02 + 0.05 * np.random.default_rng().random()):
            while True:
                c.allreduce(ones())
                for way in ("staged", *ALSO):
                    c.allreduce(ones(1_500_000), c.Sum, transport=way)
                c.allgather(ones(1 + RANK))
                c.allreduce(ones(100, "float16"), c.Sum)

    for _ in range(6):
        assert isinstance(in_a_cell(busy), KeyboardInterrupt | RankLeft)
        next_cell_works()


def aborted() -> int:
    """Returns how many communicators of the stand-in were aborted, once no abort is under way."""
    gpu = c.world.current().gpu
    if gpu is not None:
        gpu.aborts.wait(PATIENCE_SECONDS)
    return len(nccl.aborted) if FAKE else 0


@own_gpu
def test_every_epoch_has_a_communicator_of_its_own():
    c.renew()
    found = []
    before = aborted()
    for _ in range(3):
        c.allreduce(ones())
        found.append(c.world.current().groups[0].gpu)
    assert found[0] is found[2]
    assert aborted() == before
    c.renew()
    assert not FAKE or SIZE == 1 or aborted() == before + 1
    c.allreduce(ones())
    assert c.world.current().groups[0].gpu is not found[0]


@fake_only
@own_gpu
def test_what_goes_over_the_wire():
    def made(call, dtype: str, *arguments, count: int = 6) -> list[tuple]:
        nccl.launched.clear()
        call(ones(count, dtype), *arguments)
        return list(nccl.launched)

    c.allreduce(ones())
    assert made(c.allreduce, "float32", c.Sum) == [("allReduce", 6, 7, 0)]
    assert made(c.allreduce, "int16", c.Max) == [("allReduce", 6, 2, 2)]
    assert made(c.allreduce, "uint16", c.Product) == [("allReduce", 6, 3, 1)]
    assert made(c.allreduce, "complex64", c.Sum) == [("allReduce", 12, 7, 0)]
    assert made(c.allreduce, "bool", c.Sum) == [("allReduce", 6, 1, 2)]
    assert made(c.allreduce, "bool", c.Product) == [("allReduce", 6, 1, 3)]
    assert made(c.broadcast, "float64") == [("broadcast", 48, 1, -1)]
    assert made(c.allgather, "int8") == [("allGather", 6, 1, -1)]
    assert made(c.allreduce, "float64", count=0) == []
    # As many bytes as a ring moves, in the precision that came.
    half = made(c.allreduce, "float16", c.Sum)
    assert {name for name, *_ in half} <= {"send", "recv"}
    sent = sum(count for name, count, *_ in half if name == "send")
    parts = [6 * (i + 1) // SIZE - 6 * i // SIZE for i in range(SIZE)]
    assert sent == 2 * (6 - parts[RANK]) + 2 * (SIZE - 1) * parts[RANK]
    assert made(c.reducescatter, "float32", c.Sum, count=2 * SIZE) == [("reduceScatter", 2, 7, 0)]


@fake_only
@own_gpu
@two
@pytest.mark.parametrize("result", [2, 8])
def test_a_failure_of_nccl_is_told_and_mended(result):
    """Also one that the binding has no text for, as it has none for "in progress"."""
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
def test_a_gpu_that_has_failed_is_told(monkeypatch):
    # As cupy's, finalizers of events raise then; in ranks the feature for GPUs mutes them.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
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


def read_late() -> tuple[Any, np.ndarray, Any]:
    """A result, what another stream will have read of it, and the event that it reads after."""
    stream, gate = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    stream.wait_event(gate)
    came = np.zeros(5000, "float32")
    found = c.allreduce(Late(ones(5000)), c.Sum)
    assert type(found) is Late
    runtime.memcpyAsync(came.ctypes.data, found.array.data.ptr, came.nbytes, 2, stream.ptr)
    return found, came, gate


@fake_only
@pytest.mark.parametrize("captures", [False, True])
def test_memory_of_a_result_that_another_stream_reads_is_not_used_again(captures, monkeypatch):
    """Nor where CUDA refuses to wait for it, while a graph is captured."""
    if captures:
        monkeypatch.setattr(runtime, "capturing", [900])
    found, came, gate = read_late()
    del found
    assert not dlpack.wait_for_exports(0.2)
    for _ in range(5):
        c.allreduce(Late(ones(5000) * 7.0), c.Sum)
    gate.record(stream=None)
    monkeypatch.undo()
    runtime.deviceSynchronize()
    assert (came == SIZE).all()


@fake_only
def test_a_failed_cell_gives_back_what_another_library_dropped(monkeypatch):
    def note() -> None:
        at = {block.ctypes.data for blocks in _memory._free.values() for block in blocks}
        free.append(where in at)

    free: list[bool] = []
    for name in ("get_default_memory_pool", "get_default_pinned_memory_pool"):
        pool = SimpleNamespace(free_all_blocks=note)
        monkeypatch.setattr(cupy, name, lambda pool=pool: pool, raising=False)
    found, _, gate = read_late()
    where = found.array.data.ptr
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
    c.renew()
    connects = getattr(nccl, slow)

    def cell() -> None:
        if odd():
            connects.append(3.0)
        with interrupted_after(0.1, lambda: not connects) if odd() else nullcontext():
            c.allreduce(ones())

    error = in_a_cell(cell)
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
    without = odd() or SIZE == 1
    if without:
        monkeypatch.setenv("ALLRANKS_FAKE_PIN", "no")
    said: list[str] = []
    monkeypatch.setattr(c.world.current(), "notice", said.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = c.allreduce(ones(3_000_000), c.Sum, transport="staged")
    assert (host(found) == SIZE).all()
    assert len(said) == without
    assert all("memory of this rank only" in each for each in said)
    forget_blocks()


@fake_only
@one_host
def test_groups_pin_pages_of_their_own_and_give_them_back(sets, monkeypatch):
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
    gpu = forget_blocks()
    gpu.aborts.wait(PATIENCE_SECONDS)  # one that is under way would wait for the gate too
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
    assert pinned()
    opened(gate)
    next_cell_works()
    in_use = {memory.ctypes.data for memory in gpu.blocks.values()}
    assert [each for each in runtime.registered if each[0] not in in_use] == before


@fake_only
@each_way
def test_what_came_in_one_piece_is_not_copied_again(transport):
    mine = cupy.asarray(np.full((RANK + 1, 3), float(RANK)))
    wanted = np.concatenate([np.full((r + 1, 3), float(r)) for r in range(SIZE)])
    _queue.counted.clear()
    found = [c.allgather(mine, transport=transport)]
    found += c.grouped_allgather([mine], transport=transport)
    at_root = c.gather(mine, SIZE - 1, transport=transport)
    exchanged = c.alltoall(cupy.asarray(np.full((SIZE, 3), float(RANK))), transport=transport)
    assert _queue.counted["concatenate"] == 0
    for each in [*found, at_root] if RANK == SIZE - 1 else found:
        np.testing.assert_array_equal(host(each), wanted)
    np.testing.assert_array_equal(host(exchanged)[:, 0], np.arange(float(SIZE)))


@fake_only
@each_way
def test_calls_use_events_that_are_there(transport):
    for _ in range(2):
        _queue.counted.clear()
        for _ in range(2):
            c.allreduce(ones(3_000_000), c.Sum, transport=transport)
            c.allreduce(ones(9, "float16"), c.Sum, transport=transport)
            c.grouped_allreduce([ones(), ones(5)], c.Sum, transport=transport)
            c.broadcast(ones(), transport=transport)
            c.allgather(ones(1 + RANK), transport=transport)
            found = c.alltoall(ones(SIZE), transport=transport)
            assert (host(found) == 1).all()
    assert _queue.counted["event"] == 0
    assert _queue.counted["wait"] > 0


@fake_only
@two
@each_way
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
        opened(gate)
    assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    assert awaited or not odd()
    assert all(event not in spare and event.mark is mark for event, mark in awaited)
    next_cell_works()


@fake_only
@each_way
@pytest.mark.parametrize("dtype", ["float32", "int16", "float16", "complex64"])
def test_many_arrays_are_laid_out_in_one_copy(dtype, transport):
    shapes = [(), (0,), (3, 5), (2, 0), (64,), (7,), (1,), (300,), (2, 2, 2), (65,), (128,), (5,)]
    mine = [cupy.asarray(np.full(shape, n, dtype)) for n, shape in enumerate(shapes)]
    mine += [cupy.asarray(np.arange(6).reshape(2, 3).astype(dtype)).T, ones(4, "float64")]
    _queue.counted.clear()
    found = c.grouped_allreduce(mine, c.Sum, prescale_factor=2.0, transport=transport)
    assert _queue.counted["concatenate"] == 1
    # By ipc each rank copies them once more, into its window.
    assert dtype != "float32" or transport == "ipc" or _queue.counted["copyto"] == 0
    for one, source in zip(found, mine, strict=True):
        assert one.dtype == source.dtype
        np.testing.assert_array_equal(host(one), host(source) * 2 * SIZE)


class Tensor:
    """An array of a library that reads memory as it is, on a stream that cupy knows nothing of."""

    __module__ = "tensorflow"
    backing_device = "/GPU:0"
    dtype = SimpleNamespace(is_floating=True, is_integer=False)

    def __init__(self, array: Any) -> None:
        self.array, self.values = array, array._raw.copy()
        assert array.data.ptr % dlpack.ALIGNED == 0

    @classmethod
    def of_threes(cls, count: int) -> Tensor:
        made = cls(cupy.empty_like(ones(count)))
        made.array = ones(count) * 3.0
        return made


@fake_only
@each_way
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
        mine = [Tensor.of_threes(n) for n in range(1, count + 1)]
        _queue.counted.clear()
        found = c.grouped_allreduce(mine, c.Average, transport=transport)
        made = _queue.counted["wait"]
        assert _queue.counted["copy"] == 0
        assert all(type(each) is Tensor and (each.values == 3).all() for each in found)
        assert [each.values.size for each in found] == list(range(1, count + 1))
        return made

    waits(1)
    assert waits(20) == waits(1)
    options = {"compression": c.Compression.fp16, "transport": transport}
    found = c.allreduce(Tensor.of_threes(5), c.Average, **options)
    assert (found.values == 3).all()


@fake_only
def test_the_fake_refuses_to_become_numpys():
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(ones())


@one_host
def test_what_is_kept_of_a_gpu_is_as_it_is_when_its_work_is_done(tmp_path, monkeypatch):
    this = c.world.current()
    folder = c.broadcast_object(str(tmp_path))
    weights = cupy.asarray(np.arange(3.0) + RANK)
    names = {"weights": weights}
    store = VariableStore((folder,), RANK, SIZE, names)
    monkeypatch.setattr(this, "variable_store", store, raising=False)
    for _ in range(5):
        weights = weights * 2
    names["weights"] = weights
    c.keep("weights", model={"same": weights}, step=5)
    np.multiply(weights, 0, out=weights)  # what is kept is a copy
    assert not store.of_cells.settle()
    c.barrier()
    _, values = store.of_cells.load()
    assert values["model"]["same"] is values["weights"]
    assert (host(values["weights"]) == 32 * (np.arange(3) + RANK)).all()
    assert (host(weights) == 0).all()
