"""Waits in torch's stores, by which processes meet: the stop button ends them, and so does the end
of the other ranks' cells. Only cells import torch, never this module.

C++ waits for a key where no signal reaches it. Here Python waits until the key is there, and then
calls C++. A `TCPStore` for all ranks is made once all ranks are about to make it: then the wait in
its constructor is certain to end.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import wraps
from time import monotonic
from types import FrameType
from typing import Any
from weakref import WeakSet

from allranks.collectives import world as worlds
from allranks.collectives.calls.call import Pause
from allranks.collectives.calls.specs import Spec
from allranks.errors import RankLeft
from allranks.features.torch_jax import calls, other_ranks

_LONGEST_SLEEP = 0.02
"""Each look for a key is a message to the process that has the store."""
_TRIAL_SECONDS = 1.0
_AT_ONCE = timedelta(milliseconds=1)
_of_all_ranks: WeakSet[Any] = WeakSet()
"""The stores that exactly the ranks use."""


class KeptStore:
    """The store of all ranks that torch has found by the environment, kept for its next group.

    Another one would be another connection, for which C++ asks for the name of the address at both
    ends, 127.0.0.1 too. Without an answer of the name server, that takes 5 s or more each time.
    """

    def __init__(self) -> None:
        self._where: tuple[object, ...] = ()
        self._store: Any = None

    def is_for(self, rank: int) -> bool:
        """Whether it is the store of the next group, in which this process has this rank."""
        return self._where == _where(rank)

    def is_open(self) -> bool:
        """Whether the process that has the store answers. It is asked in C++: waits for that."""
        try:
            self._store.check(["allranks"])
        except RuntimeError:  # the connection was ended, as at the end of a wait in C++
            self._where, self._store = (), None
        return self._store is not None

    def with_prefix(self, prefix: str) -> Any:
        """The store for a group whose keys begin so."""
        return sys.modules["torch.distributed"].PrefixStore(prefix, self._store)

    def keeping(self, met: Iterator[tuple[Any, int, int]]) -> Iterator[tuple[Any, int, int]]:
        """Keeps what torch's rendezvous returns: the store, the rank and the number of ranks."""
        for store, rank, size in met:
            self._where, self._store = _where(rank), _underlying(store)
            yield store, rank, size


def _where(rank: int) -> tuple[object, ...]:
    return rank, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")


def wrap(is_rank: Callable[[], bool]) -> None:
    """Wraps the methods of torch's stores that wait; ``is_rank`` is whether this process is one."""
    torch: Any = sys.modules["torch._C._distributed_c10d"]
    # Stores that a program has written in Python wait in ways of their own, also behind a prefix.
    kinds = torch.TCPStore, torch.FileStore, torch.HashStore
    own_wait = torch.Store.wait

    def waiting(own: Any) -> Any:
        @wraps(own)
        def method(store: Any, keys: Any, *limit: timedelta) -> Any:
            if type(_underlying(store)) in kinds and is_rank():
                _wait(store, [keys] if isinstance(keys, str) else keys, own_wait, *limit)
            return own(store, keys, *limit)

        return method

    for name in ("get", "multi_get", "wait"):
        setattr(torch.Store, name, waiting(getattr(torch.Store, name)))
    torch.TCPStore.__init__ = _meeting(torch.TCPStore.__init__, is_rank)


def _wait(store: Any, keys: Sequence[str], own_wait: Any, limit: timedelta | None = None) -> None:
    seconds = (store.timeout if limit is None else limit).total_seconds()
    deadline, pause = monotonic() + seconds, Pause()
    while not store.check(keys):
        if monotonic() > deadline:
            _expire(store, keys, own_wait, seconds)
        _check_others(store, keys)
        pause(_LONGEST_SLEEP)


def _expire(store: Any, keys: Sequence[str], own_wait: Any, seconds: float) -> None:
    """Raises torch's error at the end of a limit of time."""
    try:
        own_wait(store, keys, _AT_ONCE)
    except RuntimeError as error:
        text = str(error).replace("after 1ms", f"after {seconds * 1000:.0f}ms")
        raise type(error)(text) from None


def _check_others(store: Any, keys: Sequence[str]) -> None:
    """Raises `RankLeft` if no rank is left that could set a key."""
    this, gone = worlds.current(), other_ranks.gone()
    if _underlying(store) not in _of_all_ranks or len(gone) < this.size - 1 or store.check(keys):
        return
    (*_, rank, why), *_ = gone
    raise RankLeft(
        f"a store of torch needs another rank to set {', '.join(map(repr, keys))}: rank {rank} "
        f"{why}. {other_ranks.advice(rank, why)}"
    )


def _underlying(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _meeting(own: Any, is_rank: Callable[[], bool]) -> Any:
    @wraps(own)
    def __init__(
        self: Any, host_name: str, port: int, world_size: int | None = None,
        is_master: bool = False, timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True, *args: Any, **options: Any,
    ) -> None:  # fmt: skip
        met = False
        if is_rank():
            if wait_for_workers and world_size is not None:
                met = _meet(self, world_size)
            if not (is_master or met):
                _wait_for_server(host_name, port, timeout.total_seconds())
        own(
            self, host_name, port, world_size, is_master, timeout, wait_for_workers, *args,
            **options,
        )  # fmt: skip

    return __init__


def _meet(store: Any, world_size: int) -> bool:
    """Waits for all ranks if they are the processes that a store is made for."""
    world = worlds.current()
    report_size(world_size)
    if world_size != world.size:
        return False
    world.run(calls.make(world.groups[0], Spec("TCPStore"), 0))
    _of_all_ranks.add(store)
    return True


def _wait_for_server(host: str, port: int, seconds: float) -> None:
    """Waits until a process listens there, because C++ takes no interrupt while it tries."""
    deadline, pause = monotonic() + seconds, Pause()
    while True:
        try:
            socket.create_connection((host, port), _TRIAL_SECONDS).close()
        except OSError as error:
            if monotonic() > deadline:
                raise sys.modules["torch.distributed"].DistNetworkError(
                    f"The client socket has timed out after {seconds * 1000:.0f}ms while trying to "
                    f"connect to ({host}, {port}): {error}"
                ) from None
            pause(_LONGEST_SLEEP)
        else:
            return


def report_size(world_size: int) -> None:
    """Gives a notice if torch is about to wait for more processes than there are ranks."""
    world = worlds.current()
    if world_size > world.size:
        world.notice(
            f"torch waits for world_size={world_size} processes, and there are {world.size} ranks: "
            "it waits until others join. If none shall, interrupt the cell, and leave world_size= "
            "and rank= out."
        )


def is_waiting(frame: FrameType | None) -> bool:
    """Whether a thread with this innermost frame waits in the constructor of a store."""
    return frame is not None and frame.f_code.co_filename == __file__
