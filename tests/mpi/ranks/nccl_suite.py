"""What NCCL's rules ask of several communicators, of aborts and of first uses.

Runs between GPUs, on one GPU where NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share it, and on the
FAKE NCCL of tests/fakes, which has the rules and their sources.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from conftest import (
    PATIENCE_SECONDS,
    enter,
    everybody,
    in_a_cell,
    interrupted_after,
    odd,
    settle,
    until,
)
from gpus import FAKE, fake_only, host, ones

import allranks.collectives as c
from allranks.collectives.calls.rank_state import LEFT
from allranks.collectives.gpu import nccl as transport
from allranks.collectives.gpu.device import NcclCallOrder
from allranks.collectives.start import under_mpi
from allranks.errors import RankLeft, TransportFailed, UsageError

if FAKE:
    from cupy.cuda import _queue, nccl, runtime

if c.size() < 2:
    pytest.skip("takes two ranks", allow_module_level=True)

three = pytest.mark.skipif(c.size() < 3, reason="two sets of two ranks each take three ranks")


def summed(count: int = 4, **options: Any) -> Any:
    return c.allreduce(ones(count), c.Sum, transport="nccl", **options)


# All skip or none does: a rank on which it works would wait for the others.
error = in_a_cell(summed)
if everybody(isinstance(error, UsageError | TransportFailed)):
    pytest.skip(f"NCCL does not connect these ranks: {error}", allow_module_level=True)


def next_cell_works() -> None:
    assert in_a_cell(lambda: np.testing.assert_array_equal(host(summed()), c.size())) is None


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    """From now on no thread starts whose name begins so."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError(why)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.fixture(scope="module")
def pair() -> c.ProcessSet:
    """The first two ranks, where they are not all."""
    return c.add_process_set([0, 1])


@pytest.fixture
def tail() -> Iterator[c.ProcessSet]:
    """Two ranks, one of which is in `pair` as well."""
    chosen = c.add_process_set([1, 2])
    yield chosen
    if chosen.process_set_id is not None:
        in_a_cell(lambda: c.remove_process_set(chosen))


def leaves_before_launching(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank is interrupted once it has agreed on its next call: the others launch theirs."""

    def interrupted(*arguments: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(transport.NcclTransport, "_event", interrupted)


def post(process_set: c.ProcessSet | None = None) -> c.Handle:
    return c.allreduce_async(ones(), c.Sum, process_set=process_set, transport="nccl")


def connect(*sets: c.ProcessSet | None) -> list[c.ProcessSet | None]:
    """Those of these sets that this rank is in, which have made a call."""
    mine = [each for each in sets if each is None or each.included()]
    for each in mine:
        summed(process_set=each)
    return mine


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_interrupt_between_agreeing_and_launching_frees_the_others(dtype, monkeypatch):
    """Also in the first use of an algorithm, or of a pair, which connects them."""
    for first in (True, False):
        if first:
            c.renew()
            c.broadcast(ones(), transport="nccl")
        if odd():
            leaves_before_launching(monkeypatch)
        error = in_a_cell(lambda: c.allreduce(ones(9, dtype), c.Sum, transport="nccl"))
        assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
        next_cell_works()


def everything(process_set: c.ProcessSet | None = None) -> list[Callable[[], object]]:
    """Every operation, the root of which is the rank that errs."""
    options: dict[str, Any] = {"transport": "nccl", "process_set": process_set}
    members = len(process_set.ranks) if process_set else c.size()
    return [
        lambda: c.allreduce(ones(), c.Max, **options),
        lambda: c.grouped_allreduce([ones(), ones(5, "float64")], c.Sum, **options),
        lambda: c.allreduce_async(ones(), c.Sum, **options).synchronize(),
        lambda: c.reducescatter(ones(members), c.Sum, **options),
        lambda: c.reducescatter(ones(members + 1), c.Sum, **options),
        lambda: c.allgather(ones(), **options),
        lambda: c.allgather(ones(1 + c.rank()), **options),
        lambda: c.alltoall(ones(members), **options),
    ]


@pytest.mark.parametrize("aborts", ["when all have left", "before the others have left"])
def test_no_operation_returns_what_an_abort_has_left_in_its_result(aborts, monkeypatch):
    """An abort ends the kernels of the others, with garbage and without an error."""
    if aborts != "when all have left":  # as the death of a rank may do
        if not c.world.current().shared_by_all:
            pytest.skip("between hosts the news of a rank that has left may come later")
        monkeypatch.setattr(transport.NcclTransport, "_is_unused", lambda self: True)
    for do in everything():
        with monkeypatch.context() as patches:
            if odd():
                leaves_before_launching(patches)
            error = in_a_cell(do)
        assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    monkeypatch.undo()
    next_cell_works()


@three
def test_no_member_of_a_set_gets_what_an_abort_has_left_in_its_result(pair, monkeypatch):
    kinds = {0: RankLeft, 1: KeyboardInterrupt}
    for do in everything(pair):
        with monkeypatch.context() as patches:
            if odd():
                leaves_before_launching(patches)
            error = in_a_cell(do if pair.included() else lambda: None)
        assert isinstance(error, kinds.get(c.rank(), type(None)))
    next_cell_works()


@fake_only
def test_no_rank_aborts_before_all_have_left_the_call(monkeypatch):
    """Here rank 0 has launched it, and computes."""
    this = c.world.current()
    word, left = this.mpi.pristine, np.zeros(1)

    def cell() -> None:
        summed()
        if c.rank() == 0:
            before, posted = len(nccl.launched), post()
            until(lambda: posted.poll() or len(nccl.launched) > before)
            word.Recv(left, 1)  # without a look at the call meanwhile
            posted.synchronize()
        elif odd():
            before = len(nccl.aborted)
            leaves_before_launching(monkeypatch)
            try:
                summed()
            finally:
                this.gpu.aborts.wait(0.5)
                aborts.append(len(nccl.aborted) - before)
                word.Send(left, 0)
        else:
            summed()

    aborts: list[int] = []
    error = in_a_cell(cell)
    assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    assert aborts == ([0] if odd() else [])
    next_cell_works()


@fake_only
@pytest.mark.parametrize("transport", ["nccl", "staged"])
def test_an_interrupt_ends_a_call_while_the_gpu_still_works(transport, monkeypatch):
    """The arrays stay held, and the abort comes after the work."""
    next_cell_works()
    works, over = threading.Event(), threading.Event()

    def work() -> object:
        works.set()
        return None if over.is_set() else _queue._AGAIN

    def cell() -> None:
        mine = ones()
        _queue.push(work)
        with interrupted_after(0.1, works.is_set):
            c.allreduce(mine, c.Sum, transport=transport)

    # Without the cure this rank waits for it, inside the driver.
    late = threading.Timer(PATIENCE_SECONDS / 3, over.set)
    late.start()
    gpu = c.world.current().gpu
    gpu.aborts.wait(PATIENCE_SECONDS)
    enter()
    with pytest.raises((KeyboardInterrupt, RankLeft)):  # another rank may be interrupted first
        cell()
    gpu.mark()  # as the next calls of CUDA
    assert gpu._held
    assert not over.is_set()
    over.set()
    late.cancel()
    c.scope.leave("KeyboardInterrupt", failed=True, where="cell:1")
    settle()
    next_cell_works()
    gpu.aborts.wait(PATIENCE_SECONDS)
    gpu.mark()
    assert not gpu._held


def test_a_rank_leaves_while_another_computes_and_aborts_nothing():
    next_cell_works()
    this = c.world.current()

    def cell() -> None:
        if c.rank() == 0:
            number = this.scope.number + 1
            until(lambda: this.board.get(1, LEFT) >= number)
            return
        with interrupted_after(0.1) if odd() else nullcontext():
            summed()

    error = in_a_cell(cell)
    assert isinstance(error, KeyboardInterrupt if odd() else RankLeft if c.rank() else type(None))
    next_cell_works()


@three
def test_a_communicator_that_rests_is_aborted_with_one_that_hangs(pair, monkeypatch):
    def cell() -> None:
        connect(None, pair)
        if pair.included():
            if odd():
                leaves_before_launching(monkeypatch)
            summed(3, process_set=pair)

    for _ in range(2):
        error = in_a_cell(cell)
        kinds = {0: RankLeft, 1: KeyboardInterrupt}
        assert isinstance(error, kinds.get(c.rank(), type(None)))
        next_cell_works()
        assert in_a_cell(lambda: summed(process_set=pair) if pair.included() else None) is None


@three
def test_sets_that_are_used_in_opposite_orders_do_not_wait_for_each_other(pair):
    found: list[Any] = []

    def cell() -> None:
        for _ in range(40):
            sets = [None, pair] if pair.included() else [None]
            posted = [
                c.allreduce_async(ones(2000), c.Sum, process_set=each, transport="nccl")
                for each in (sets if odd() else reversed(sets))
            ]
            found.extend(host(each.synchronize()) for each in (posted if odd() else posted[::-1]))

    assert in_a_cell(cell) is None
    wanted = [c.size(), 2] if pair.included() else [c.size()]
    for index, array in enumerate(found):
        np.testing.assert_array_equal(array, wanted[index % len(wanted)])


@fake_only
@three
def test_nothing_is_launched_before_it_is_its_turn_on_all_members(pair, monkeypatch):
    """On rank 0, while rank 1 still needs it for a call of another set."""
    come, launched_early, enter = [False], [False], NcclCallOrder.enter

    def late(order: NcclCallOrder, call: Any, host: Any) -> Any:
        while call.members.size == 2 and not come[0]:
            yield call
        yield from enter(order, call, host)

    def cell() -> None:
        connect(None, pair)
        before, posted = len(nccl.launched), []
        if c.rank() == 0:
            monkeypatch.setattr(NcclCallOrder, "enter", late)
            posted.append(post(pair))
        c.barrier()
        if c.rank() == 1:
            posted.append(post(pair))
        posted.append(post())
        for _ in range(100 if c.rank() == 0 else 0):
            posted[-1].poll()
            time.sleep(0.005)
            launched_early[0] |= len(nccl.launched) > before
        come[0] = True
        for handle in posted:
            handle.synchronize()

    assert in_a_cell(cell) is None
    assert not launched_early[0]


@three
def test_a_rank_that_leaves_a_set_frees_those_that_wait_behind_its_call(pair, tail, monkeypatch):
    """Also those that are in no set with it."""
    enter, told, mine = NcclCallOrder.enter, [], np.ones(1)

    def telling(order: NcclCallOrder, call: Any, host: Any) -> Any:
        for step in enter(order, call, host):
            if call.behind is not None and not told:
                told.append(raw.Isend(mine, 2))
            yield step

    def never(order: NcclCallOrder, call: Any, host: Any) -> Any:
        while True:
            yield call

    def cell() -> None:
        connect(pair, tail)
        if c.rank() == 2:
            # It neither ends this call nor leaves the cell before rank 1 waits behind it.
            monkeypatch.setattr(NcclCallOrder, "enter", never)
            posted = post(tail)
        c.barrier()
        if c.rank() == 2:
            until(lambda: posted.poll() or raw.Iprobe(1))
            monkeypatch.undo()
            raise ValueError("before synchronize")
        if odd():
            posted, order = post(tail), c.world.current().gpu.call_order
            until(lambda: posted.poll() or tail.process_set_id in order._calls)
            monkeypatch.setattr(NcclCallOrder, "enter", telling)
        if pair.included():
            summed(process_set=pair)

    raw = c.world.current().mpi.pristine
    error = in_a_cell(cell)
    for sent in told:
        sent.Wait()
    if c.rank() == 2 and raw.Iprobe(1):
        raw.Recv(mine, 1)
    kinds = {0: RankLeft, 1: RankLeft, 2: ValueError}
    assert isinstance(error, kinds.get(c.rank(), type(None)))
    if odd():
        assert "rank 2 has left this cell" in str(error)
    next_cell_works()


def test_a_group_that_is_dropped_after_a_broadcast_has_served_the_others(request):
    """It may be closed while other members still wait for what this rank sends."""
    next_cell_works()
    if FAKE:
        nccl.serves_after[0] = 0.3
        request.addfinalizer(lambda: nccl.serves_after.__setitem__(0, 0.0))

    def cell() -> None:
        mine = ones(1_000_000) * float(c.rank() + 1)
        found = c.broadcast(mine, 0, transport="nccl")
        if c.rank() == 0:
            c.world.current().groups[0].abandon()
        assert (host(found) == 1).all()

    assert in_a_cell(cell) is None
    c.renew()
    next_cell_works()


@fake_only
@three
def test_a_set_that_is_removed_leaves_no_communicator(tail):
    def cell() -> None:
        connect(tail)
        before = len(nccl.aborted)
        c.remove_process_set(tail)
        c.world.current().gpu.aborts.wait(PATIENCE_SECONDS)
        assert len(nccl.aborted) == before + (c.rank() in (1, 2))
        summed()

    assert in_a_cell(cell) is None


@fake_only
def test_process_sets_of_an_ensemble_leave_nothing_on_the_gpu():
    """Their communicators end when all neighbours have come to make their next set."""
    part, before, ended = under_mpi.divide(c.size()), list(runtime.registered), len(nccl.aborted)

    def member(number: int) -> None:
        with under_mpi.inside(part):
            c.scope.enter("this member", None, number)
            for few in connect(c.add_process_set([0])):
                c.allreduce(ones(), transport="staged", process_set=few)
            c.scope.leave("it ended")

    for number in (1, 2):
        member(number)
    if c.rank() == 0:
        assert part.gpu is not None
        part.gpu.aborts.wait(PATIENCE_SECONDS)
    assert len(nccl.aborted) == ended + (c.rank() == 0)
    assert runtime.registered == before


@fake_only
def test_no_call_connects_on_the_main_thread():
    c.renew()
    nccl.connected.clear()
    summed()
    c.allreduce(ones(9, "float16"), c.Sum, transport="nccl")
    c.alltoall(ones(c.size()), transport="nccl")
    c.broadcast(ones(), transport="nccl")
    c.allgather(ones(1 + c.rank()), transport="nccl")
    assert nccl.connected
    assert "MainThread" not in nccl.connected


@fake_only
def test_communicators_are_made_and_end_where_no_thread_can_be_started(monkeypatch):
    """As while the interpreter ends, from Python 3.12 on."""
    next_cell_works()
    before = len(nccl.aborted)
    refuse_threads(monkeypatch, "allranks", "can't create new thread at interpreter shutdown")
    c.renew()
    assert len(nccl.aborted) > before
    next_cell_works()


@fake_only
def test_who_connects_for_long_says_so_where_warnings_are_errors(monkeypatch):
    c.renew()
    said: list[str] = []
    monkeypatch.setattr(c.world.current(), "notice", said.append)
    monkeypatch.setattr(transport, "_TOLD_SECONDS", 0.1)
    if odd():
        nccl.slow_seconds.append(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_a_cell(summed) is None
    assert sum("NCCL has not connected ranks 0" in text for text in said) == 1, said


@fake_only
def test_without_room_for_a_thread_calls_fail_and_aborts_wait(monkeypatch):
    next_cell_works()
    before = len(nccl.aborted)
    refuse_threads(monkeypatch, "allranks-nccl", "can't start new thread")
    c.renew()
    assert len(nccl.aborted) == before
    error = in_a_cell(summed)
    assert isinstance(error, TransportFailed)
    assert "NCCL needs a thread to connect ranks 0" in str(error)
    assert "can't start new thread" in str(error)
    monkeypatch.undo()
    c.renew()
    gpu = c.world.current().gpu
    assert gpu is not None
    gpu.aborts.wait(PATIENCE_SECONDS)
    assert len(nccl.aborted) == before + 1
    next_cell_works()


@fake_only
def test_a_launch_that_is_refused_says_so():
    next_cell_works()

    def cell() -> None:
        if odd():
            nccl.refuses.append("NCCL_ERROR_UNHANDLED_CUDA_ERROR: the fake was told to refuse")
        summed()

    error = in_a_cell(cell)
    if odd():
        assert isinstance(error, TransportFailed)
        assert "NCCL has failed: NCCL_ERROR_" in str(error)
    else:
        assert isinstance(error, RankLeft)
    next_cell_works()


def test_aborts_leave_no_thread():
    c.renew()
    gpu = c.world.current().gpu
    assert gpu is not None
    gpu.aborts.wait(PATIENCE_SECONDS)
    until(lambda: "allranks-nccl-abort" not in [t.name for t in threading.enumerate()])
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"
