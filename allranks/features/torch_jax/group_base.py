"""The identity of a process group on allranks, and how it runs a call. It imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from allranks.collectives import world as worlds
from allranks.collectives.calls.call import Call
from allranks.collectives.world.world import Group, World
from allranks.errors import UsageError
from allranks.features.torch_jax import calls
from allranks.features.torch_jax.works import CallWork, FinishedWork

#: Longer timeouts are torch's defaults. A call of allranks waits for a late rank, and reports it.
NO_LIMIT_SECONDS = 1800.0


class GroupOptions:
    """The attributes that torch sets on the options of its own backends."""

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout = timeout
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class BaseGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose members are the ranks of a group of allranks.

    Args:
        world: the rank's world.
        number: the number of the group in it.
        ranks: the members' ranks in the world, in the order of torch's ranks.
        name: torch's name of the group.
        timeout: the time limit of each call; the default of torch stands for none.
    """

    def __init__(
        self, world: World, number: int, ranks: Sequence[int], name: str,
        timeout: timedelta | None = None, store: Any = None,
    ) -> None:  # fmt: skip
        self.ranks = tuple(ranks)
        super().__init__(self.ranks.index(world.rank), len(self.ranks))
        self._world, self._number, self._name, self._desc = world, number, name, ""
        self._store = store
        self.backend_name = "allranks"
        """The name of the backend that was asked for."""
        self._name_in_cpp = "allranks"
        self._closed = False
        self.options = GroupOptions(timeout)
        self._seconds = NO_LIMIT_SECONDS
        self._coalescing: list[Any] | None = None
        self._bound: Any = None
        if timeout is not None:
            self._seconds = timeout.total_seconds()

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self._world.rank)

    def name(self) -> str:
        return self._name_in_cpp

    def call_itself(self, backend: str) -> None:
        """Sets the name of the backend, as the user has asked for it."""
        self.backend_name = backend
        if backend != "gloo":
            return
        # DDP's logger in C++ asks a group of this name for its gloo, and reads its number of
        # threads. It gets one without peers. It stands for a device that no tensor has data on, so
        # that no call can reach it.
        with suppress(Exception):
            kind = dist.ProcessGroup.BackendType.GLOO
            self._register_backend(torch.device("meta"), kind, _lonely_gloo())
            self._name_in_cpp = backend

    getBackendName = _get_backend_name = name

    def getGroupName(self) -> str:
        # C++ asks for it; its own needs a backend for each device.
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    def getGroupDesc(self) -> str:
        return self._desc

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, text: str) -> None:
        self._desc = text

    setGroupDesc = _set_group_desc

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu")]

    @property
    def bound_device_id(self) -> Any:
        return self._bound

    @bound_device_id.setter
    def bound_device_id(self, device: Any) -> None:
        self._bound = device

    @property
    def supports_splitting(self) -> bool:
        return False

    def _get_backend(self, device: Any) -> Any:
        return self

    def set_store(self, store: Any) -> None:
        self._store = store

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return int(getattr(self.core().agreement, "number", 0) & 0xFFFFFFFF)

    def _set_sequence_number_for_group(self) -> None:
        # Calls are counted by allranks.
        pass

    def core(self) -> Group:
        """The group of allranks.

        Raises:
            UsageError: it does not exist any more.
        """
        world = worlds.current()
        group = world.groups.get(self._number) if world is self._world else None
        if group is None or self._closed:
            raise UsageError(
                "a process group of torch needs the ranks that made it: this one was closed. "
                "Type: dist.init_process_group()"
            )
        return group

    def shutdown(self) -> None:
        """Closes the group on this rank."""
        self._closed = True
        group = self._world.groups.get(self._number)
        if self._number and group is not None and group.channel is not None:
            # On several hosts, all members make a communicator of the group in each epoch.
            self._world.close(self._number)

    abort = shutdown

    def _finish(self, call: Call, options: Any, outputs: Sequence[Any]) -> Any:
        """Runs the call, or posts it if it is asynchronous; returns its handle."""
        self._limit(call, options)
        if getattr(options, "asyncOp", True) or self._coalescing is not None:
            work = CallWork(call, outputs)
            if self._coalescing is not None:
                self._coalescing.append(work)
            return work
        self._world.run(call)
        return FinishedWork(outputs)

    def _limit(self, call: Call, options: Any) -> None:
        seconds = self._seconds_of(options)
        if seconds < NO_LIMIT_SECONDS:
            call.steps = calls.limited(call.steps, seconds, lambda: calls.expired(call, seconds))

    def _seconds_of(self, options: Any) -> float:
        timeout = getattr(options, "timeout", None)
        # Options without a timeout have a negative one.
        if timeout is not None and timeout > timedelta(0):
            return min(float(timeout.total_seconds()), self._seconds)
        return self._seconds


@cache
def _lonely_gloo() -> Any:
    return dist.distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=1))
