"""What ranks that share one GPU need of the memory that they share on it: `gpu/ipc.py`.

Runs on a GPU that all ranks share, and on the FAKE cupy of tests/fakes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from conftest import ODD, everybody, in_a_cell, interrupted_after, odd, until
from gpus import FAKE, cupy, fake_only, host, ones

import allranks.collectives as c
from allranks.collectives.gpu import transport, windows
from allranks.collectives.gpu.ipc import IpcTransport
from allranks.errors import CollectiveMismatch, RankLeft, RankLost, UsageError

if FAKE:
    from cupy.cuda import _queue, runtime

SIZE, RANK = c.size(), c.rank()
LARGE = 1_500_000
"""Elements for several rounds of the fake's windows."""


def summed(count: int = 4, **options: Any) -> np.ndarray:
    return host(c.allreduce(ones(count), c.Sum, transport="ipc", **options))


def moved_by() -> str:
    return c.records()[-1].transport


# All skip or none does: a rank on which it works would wait for the others.
error = in_a_cell(summed)
if everybody(isinstance(error, UsageError) or (error is None and moved_by() != "ipc")):
    pytest.skip(f"no memory on a GPU that these ranks share: {error}", allow_module_level=True)

two = pytest.mark.skipif(SIZE < 2, reason="takes two ranks")


def next_cell_works() -> None:
    assert in_a_cell(lambda: np.testing.assert_array_equal(summed(LARGE), SIZE)) is None
    assert moved_by() == "ipc"


def everything() -> list[Callable[[], object]]:
    """Every operation, the root of which is the rank that errs."""
    options: dict[str, Any] = {"transport": "ipc"}
    return [
        lambda: c.allreduce(ones(LARGE), c.Max, **options),
        lambda: c.grouped_allreduce([ones(), ones(5, "float64")], c.Sum, **options),
        lambda: c.allreduce_async(ones(), c.Average, **options).synchronize(),
        lambda: c.reducescatter(ones(SIZE + 1), c.Sum, **options),
        lambda: c.broadcast(ones(), ODD, **options),
        lambda: c.allgather(ones(1 + RANK), **options),
        lambda: c.alltoall(ones(SIZE), **options),
    ]


@pytest.mark.parametrize("window", [1 << 12, 3 << 10])
def test_an_array_passes_through_windows_of_any_size(window, monkeypatch):
    monkeypatch.setattr(windows, "_MOST_BYTES", window)
    c.renew()
    mine = cupy.asarray(np.arange(5000, dtype="float32") + RANK)
    wanted = np.arange(5000, dtype="float32") * SIZE + sum(range(SIZE))
    np.testing.assert_array_equal(host(c.allreduce(mine, c.Sum, transport="ipc")), wanted)
    part = host(c.reducescatter(mine, c.Sum, transport="ipc"))
    np.testing.assert_array_equal(np.concatenate(c.allgather_object(part)), wanted)
    gathered = host(c.allgather(mine[: 4000 + RANK], transport="ipc"))
    wanted = np.concatenate([np.arange(4000 + r, dtype="float32") + r for r in range(SIZE)])
    np.testing.assert_array_equal(gathered, wanted)
    assert host(c.broadcast(mine, SIZE - 1, transport="ipc"))[-1] == 4998 + SIZE
    found = host(c.alltoall(mine[: 1000 * SIZE], transport="ipc"))
    wanted = np.concatenate([np.arange(1000.0) + 1000 * RANK + r for r in range(SIZE)])
    np.testing.assert_array_equal(found, wanted)
    monkeypatch.undo()
    c.renew()


def test_without_a_transport_only_large_arrays_pass_through_windows(monkeypatch):
    monkeypatch.setattr(transport, "IPC_FROM_BYTES", 1 << 20)
    c.renew()
    large = SIZE << 18  # numbers of 4 bytes
    for count, way in ((large, "ipc"), (4, "staged"), (large, "ipc"), (large - 1, "staged")):
        np.testing.assert_array_equal(host(c.allreduce(ones(count), c.Sum)), SIZE)
        assert SIZE == 1 or moved_by() == way
    # On every rank, by the bytes of all.
    c.allgather(ones(large if RANK == SIZE - 1 else 4))
    assert SIZE == 1 or moved_by() == "ipc"
    monkeypatch.undo()
    c.renew()


@two
def test_a_difference_is_named_before_an_array_is_copied():
    next_cell_works()
    for what, differs in (
        ("shape", lambda: summed(4 + odd())),
        ("transport", lambda: c.allreduce(ones(), transport="staged" if odd() else "ipc")),
    ):
        error = in_a_cell(differs)
        assert isinstance(error, CollectiveMismatch)
        assert f"needs the same {what} on every rank" in str(error)
        next_cell_works()


@two
def test_no_operation_has_a_result_once_a_rank_has_left_it_and_no_window_is_read(monkeypatch):
    """Each rank has filled its window. The first reads those of the others in every call."""
    next_cell_works()
    came, read = IpcTransport._read, []

    def leaves(self: IpcTransport, call: Any, work: Any) -> Any:
        raise KeyboardInterrupt

    def comes_later(self: IpcTransport, call: Any, work: Any) -> Any:
        until(lambda: self.own.has_left(ODD, self._epoch))
        return came(self, call, work and (lambda: read.append(work())))

    for do in everything():
        with monkeypatch.context() as patches:
            patches.setattr(IpcTransport, "_read", leaves if odd() else comes_later)
            error = in_a_cell(do)
        assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    assert read == []
    next_cell_works()


@two
def test_no_window_is_read_once_the_death_of_its_rank_is_known(monkeypatch):
    next_cell_works()
    this, came, read = c.world.current(), IpcTransport._read, []
    word, told = this.mpi.pristine, []

    def dies(self: IpcTransport, call: Any, work: Any) -> Any:
        if odd():
            # The others take it for dead before they hear that it left.
            for rank in {*range(SIZE)} - {ODD}:
                word.recv(source=rank)
            raise KeyboardInterrupt
        this.died[ODD] = "has died"
        told.append(word.isend(None, ODD))
        return came(self, call, work and (lambda: read.append(work())))

    def cell() -> None:
        try:
            summed()
        finally:
            this.died.pop(ODD, None)

    with monkeypatch.context() as patches:
        patches.setattr(IpcTransport, "_read", dies)
        error = in_a_cell(cell)
    for sent in told:
        sent.wait()
    assert isinstance(error, KeyboardInterrupt if odd() else RankLost)
    assert read == []
    next_cell_works()


@two
@pytest.mark.parametrize("where", ["filling", "reading"])
def test_a_rank_that_is_interrupted_frees_the_others(where, monkeypatch):
    next_cell_works()
    wait = c.world.current().gpu.wait
    skips = iter([False] * (where == "reading"))

    def interrupted(*arguments: Any) -> Any:
        if next(skips, True):
            raise KeyboardInterrupt
        return wait(*arguments)

    with monkeypatch.context() as patches:
        if odd():
            patches.setattr(c.world.current().gpu, "wait", interrupted)
        error = in_a_cell(summed)
    assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    next_cell_works()


@pytest.fixture
def gate() -> Iterator[Any]:
    """An event that the work of the caller's stream waits for, until the end of the test."""
    event = cupy.cuda.Event()
    yield event
    event.record(cupy.cuda.Stream(non_blocking=True))
    runtime.deviceSynchronize()


@fake_only
@two
def test_windows_of_other_ranks_are_closed_once_the_gpu_is_through(gate, monkeypatch):
    """A close waits inside the driver for all that the GPU does, which no interrupt would end."""
    next_cell_works()
    assert len(runtime.opened) == SIZE - 1
    c.renew()
    until(c.world.current().gpu.windows.all_closed)
    assert not runtime.opened
    next_cell_works()
    ready = []

    def cell() -> None:
        mine = ones()
        cupy.cuda.get_current_stream().wait_event(gate)
        ready.append(mine)
        with interrupted_after(0.1, lambda: bool(ready)) if odd() else nullcontext():
            c.allreduce(mine, c.Sum, transport="ipc")

    error = in_a_cell(cell)
    assert isinstance(error, KeyboardInterrupt if odd() else RankLeft)
    assert len(runtime.opened) == SIZE - 1
    opens, before = windows.GpuWindows.open, []

    def note(self: windows.GpuWindows, handle: bytes) -> int:
        before.append(len(runtime.opened))
        return opens(self, handle)

    monkeypatch.setattr(windows.GpuWindows, "open", note)
    gate.record(cupy.cuda.Stream(non_blocking=True))
    next_cell_works()
    assert before == [*range(SIZE - 1)]


@fake_only
@two
@pytest.mark.parametrize("refused", ["no", "not opened"])
def test_where_no_window_can_be_opened_arrays_are_staged_and_it_is_said_once(refused, monkeypatch):
    c.renew()
    this, said = c.world.current(), []
    monkeypatch.setattr(this, "notice", said.append)
    if odd():
        monkeypatch.setenv(runtime.IPC, refused)
    for _ in range(2):
        for _ in range(2):
            assert (host(c.allreduce(ones(LARGE), c.Sum, transport="ipc")) == SIZE).all()
            assert moved_by() == "staged"
        until(this.gpu.windows.all_closed)
        assert not runtime.opened
        c.renew()
    assert len(said) == (RANK == 0)
    assert all("CUDA refuses it to rank 1 (cudaError" in each for each in said)
    assert all("are staged through the host. There is none in WSL 2" in each for each in said)
    monkeypatch.undo()
    this.gpu.windows.reported = False
    next_cell_works()


@fake_only
def test_each_call_uses_events_that_are_there():
    for _ in range(2):
        _queue.counted.clear()
        for do in everything() if SIZE > 1 else []:
            do()
    assert _queue.counted["event"] == 0


def test_the_environment_chooses_it_for_allreduce(monkeypatch):
    monkeypatch.setitem(os.environ, "ALLRANKS_ALLREDUCE", "ipc")
    assert (host(c.allreduce(ones(), c.Sum)) == SIZE).all()
    assert moved_by() == "ipc"
