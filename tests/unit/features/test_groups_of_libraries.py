"""The end of torch's and JAX's own groups, on stand-ins that behave as on an H200 with NCCL."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.collectives.calls.call import Members
from allranks.features.torch_jax import other_ranks, torch_state
from allranks.features.torch_jax.call_log import CallLog, rank_calls
from allranks.features.torch_jax.jax_waits import JaxWaits
from allranks.features.torch_jax.torch_waits import TorchWaits
from allranks.records.ranks import RUNNING

C10D = "torch.distributed.distributed_c10d"


class OfNccl:
    """A group of NCCL."""

    def __init__(self, log: Any = None) -> None:
        self.aborted, self.log = 0, log

    def abort(self) -> None:
        self.aborted += 1

    def _get_backend(self, device: str) -> object:
        assert device == "cuda"
        return self


class OfGloo(OfNccl):
    def _get_backend(self, device: str) -> object:
        raise RuntimeError("No backend type associated with device type cuda")


class C10d(SimpleNamespace):
    """The module of torch with all groups."""

    def is_initialized(self) -> bool:
        return bool(self._world.pg_map)

    def destroy_process_group(self) -> None:
        groups = self._world.pg_map
        on_gpu = [group for group in groups if not isinstance(group, OfGloo)]
        assert not on_gpu, "it waits for ever: other ranks have aborted"
        groups.clear()

    def _abort_process_group(self) -> None:
        self._world.pg_map.clear()


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = C10d(_world=SimpleNamespace(pg_map={}))
    monkeypatch.setitem(sys.modules, C10D, module)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(device=str))  # type: ignore[arg-type]
    kept = rank_calls.instead_of
    yield module
    rank_calls.instead_of = kept


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 0 of three. ``left`` are ranks that have left the cell, ``closed`` the connections."""
    found = SimpleNamespace(left=set(), closed=set(), epoch=3, doing=RUNNING, size=3)
    found.departure = lambda rank: (0, "has left cell In[1]") if rank in found.left else None
    monkeypatch.setattr(other_ranks.world, "current", lambda: found)
    monkeypatch.setattr(other_ranks, "has_closed", lambda rank: rank in found.closed)
    return found


@pytest.mark.parametrize("group", [OfNccl, OfGloo])
def test_groups_are_gone_before_the_next_cell_although_others_have_aborted(torch, world, group):
    groups = [group(), group()]
    torch._world.pg_map.update(dict.fromkeys(groups))
    assert TorchWaits().after_death()
    assert not torch._world.pg_map
    assert {each.aborted for each in groups} == {1 if group is OfNccl else 0}


def test_what_a_rank_does_meanwhile_is_shown(torch, world):
    seen: list[str] = []
    group = OfNccl()
    group.abort = lambda: seen.append(str(world.doing))  # type: ignore[method-assign]
    torch._world.pg_map[group] = None
    TorchWaits().after_death()
    assert seen == ["ending torch's groups"]
    assert world.doing == RUNNING


def pages() -> list[CallLog]:
    """The logs of three members."""
    memory = mmap.mmap(-1, CallLog.nbytes(3))
    return [CallLog(Members(5, (0, 1, 2), rank), (0, 1, 2), memory) for rank in range(3)]


def begin(*logs: CallLog) -> None:
    for log in logs:
        log.number = log.words[log._mine >> 3] = log.number + 1


def test_a_group_is_aborted_once_the_others_have_left_its_last_call(torch, world):
    """An abort would end their kernels, with garbage and without an error."""
    mine, second, third = pages()
    group = OfNccl(mine)
    begin(mine, second)
    assert not torch_state.is_unused(group)  # rank 1 may still be in it, rank 2 never was
    world.closed.add(1)
    assert torch_state.is_unused(group)
    begin(third)
    assert not torch_state.is_unused(group)
    world.left.add(2)
    assert torch_state.is_unused(group)


def test_jax_on_a_gpu_is_shut_down_on_the_ranks_that_survive_a_death(world, monkeypatch):
    """Otherwise its next use would wait for the dead rank, or JAX would abort this one."""
    done: list[str] = []
    state = SimpleNamespace(client=object())

    def shut_down() -> None:
        state.client = None
        done.append("shut down")

    config = SimpleNamespace(jax_enable_recoverability=True)
    modules = {
        "jax": SimpleNamespace(config=config, distributed=SimpleNamespace(shutdown=shut_down)),
        "jax._src.distributed": SimpleNamespace(global_state=state),
        "jax._src.xla_bridge": SimpleNamespace(_backends={"cuda": object()}, backends=dict),
        "jax._src.api": SimpleNamespace(clear_backends=lambda: done.append("cleared")),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert "initialize() again" in JaxWaits().after_death()
    assert done == ["shut down", "cleared"]
    config.jax_enable_recoverability, state.client = False, object()
    assert "aborts the other processes" in JaxWaits().after_death()
    state.client = None
    assert JaxWaits().after_death() == ""
