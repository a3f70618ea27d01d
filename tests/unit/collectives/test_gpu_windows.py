"""Memory on a GPU that ranks share: how much, whose, and when it is closed; CUDA is a stand-in."""

import gc
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from allranks.collectives.gpu import windows
from allranks.collectives.gpu.windows import GpuWindows

GIB = 1 << 30


class Cupy:
    """One GPU of so many bytes, whose pool has a limit."""

    def __init__(self, whole: int = 16 * GIB, limit: int = 0) -> None:
        self.limit, self.allocated, self.closed = limit, [], []
        runtime = SimpleNamespace(
            memGetInfo=lambda: (whole // 2, whole),
            malloc=self._malloc,
            ipcGetMemHandle=lambda at: at.to_bytes(64, "big"),
            ipcCloseMemHandle=self._close,
        )
        self.cuda = SimpleNamespace(runtime=runtime, Device=lambda number: nullcontext())

    def get_default_memory_pool(self):
        return SimpleNamespace(get_limit=lambda: self.limit, set_limit=self._set_limit)

    def _malloc(self, nbytes):
        self.allocated.append(nbytes)
        return 1000 * len(self.allocated)

    def _set_limit(self, size):
        self.limit = size

    def _close(self, at):
        if at < 0:
            raise RuntimeError("cudaErrorIllegalAddress")
        self.closed.append(at)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(windows, "_spare", defaultdict(list))
    monkeypatch.setattr(windows, "_closing", [])


@pytest.mark.parametrize(
    ("whole", "nbytes"),
    [(139 * GIB, 256 << 20), (8 * GIB, 128 << 20), (GIB + 99_999_999, 16 << 20), (9, 2 << 20)],
)
def test_a_window_takes_a_small_part_of_the_gpu(whole, nbytes):
    assert GpuWindows(Cupy(whole), 0).size() == nbytes


def test_a_window_is_a_part_of_the_ranks_share_of_the_memory():
    cupy = Cupy(limit=4 * GIB)
    own = GpuWindows(cupy, 0)
    assert own.own(0) == own.own(0) == 1000
    assert cupy.allocated == [256 << 20]
    assert cupy.limit == 4 * GIB - (256 << 20)
    cupy.limit = 100  # less than the window: a limit of 0 would be none
    own.own(1)
    assert cupy.limit == 1


def test_without_a_limit_there_is_none_afterwards():
    cupy = Cupy()
    GpuWindows(cupy, 0).own(0)
    assert cupy.limit == 0


def test_a_window_of_a_group_that_has_ended_is_the_next_ones():
    """It is not freed: another rank may have it open."""
    cupy = Cupy()
    own = GpuWindows(cupy, 0)
    first, second = own.own(0), own.own(7)
    assert first != second
    own.forget(7)
    own.forget(7)
    assert own.own(8) == second
    assert len(cupy.allocated) == 2


def test_the_windows_of_a_world_that_has_ended_are_the_next_worlds():
    cupy = Cupy()
    ended = GpuWindows(cupy, 0)
    ended.own(0)
    del ended
    gc.collect()
    assert GpuWindows(cupy, 0).own(0) == 1000
    assert len(cupy.allocated) == 1


def test_what_is_open_is_closed_once_it_is_unused():
    cupy, used = Cupy(), {1, 2}
    own = GpuWindows(cupy, 0)
    own.close([10, 11], lambda: 1 not in used)
    own.close([20], lambda: 2 not in used)
    assert not own.all_closed()
    assert cupy.closed == []
    used.remove(2)
    # Also by another world of this process.
    assert not GpuWindows(cupy, 0).all_closed()
    assert cupy.closed == [20]
    used.clear()
    assert own.all_closed()
    assert cupy.closed == [20, 10, 11]


def test_a_gpu_that_has_failed_has_nothing_left_to_close():
    cupy = Cupy()
    own = GpuWindows(cupy, 0)
    own.close([-1], lambda: True)
    own.close([5], lambda: True)
    assert own.all_closed()
    assert cupy.closed == [5]
