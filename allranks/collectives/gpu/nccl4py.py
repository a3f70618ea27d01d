"""NCCL through NVIDIA's own binding, under cupy's names: communicators whose calls never block.

What a call has not done when it returns goes on in a thread of NCCL's, and may be aborted there.
Chosen by ALLRANKS_NCCL=nccl4py; it has not run on a GPU yet.

Source: nccl4py 0.6, ``nccl.bindings.nccl``; NCCL user guide, "Fault Tolerance".
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from allranks.collectives.gpu.nccl_types import IN_PROGRESS

available = True


class InProgress(KeyError):
    """What has been asked of a communicator goes on; cupy's own word for it is a KeyError."""


def _bindings() -> Any:
    return import_module("nccl.bindings.nccl")


def _told(call: Callable[..., Any], *arguments: Any) -> Any:
    """Calls NCCL; its errors become those that cupy raises."""
    try:
        return call(*arguments)
    except _bindings().NCCLError as error:
        raise RuntimeError(str(error)) from error


def get_version() -> int:
    """As 22703 for 2.27.3."""
    return int(_told(_bindings().get_version))


def get_unique_id() -> bytes:
    """What the members of a new communicator must have in common."""
    found = _told(_bindings().get_unique_id)
    return np.ndarray((1,), _bindings().unique_id_dtype, buffer=found).tobytes()


def groupStart() -> None:
    """The calls from here on are launched together."""
    _told(_bindings().group_start)


def groupEnd() -> None:
    """Launches them; where that takes long it goes on afterwards."""
    _told(_bindings().group_end)


class NcclCommunicator:
    """One communicator; what it is asked for is done once `check_async_error` raises nothing."""

    def __init__(self, members: int, unique: bytes, me: int, /) -> None:
        nccl = _bindings()
        config = nccl.Config()
        config.blocking = 0
        name = nccl.UniqueId.from_buffer(unique)
        self._comm = _told(nccl.comm_init_rank_config, members, name, me, config)
        self._nccl = nccl

    def allReduce(self, send: int, recv: int, n: int, dtype: int, op: int, stream: int, /) -> None:
        """ncclAllReduce."""
        _told(self._nccl.all_reduce, send, recv, n, dtype, op, self._comm, stream)

    def reduce(
        self, send: int, recv: int, n: int, dtype: int, op: int, root: int, stream: int, /
    ) -> None:
        """ncclReduce."""
        _told(self._nccl.reduce, send, recv, n, dtype, op, root, self._comm, stream)

    def broadcast(
        self, send: int, recv: int, n: int, dtype: int, root: int, stream: int, /
    ) -> None:
        """ncclBroadcast."""
        _told(self._nccl.broadcast, send, recv, n, dtype, root, self._comm, stream)

    def reduceScatter(
        self, send: int, recv: int, n: int, dtype: int, op: int, stream: int, /
    ) -> None:
        """ncclReduceScatter."""
        _told(self._nccl.reduce_scatter, send, recv, n, dtype, op, self._comm, stream)

    def allGather(self, send: int, recv: int, n: int, dtype: int, stream: int, /) -> None:
        """ncclAllGather."""
        _told(self._nccl.all_gather, send, recv, n, dtype, self._comm, stream)

    def send(self, buffer: int, n: int, dtype: int, peer: int, stream: int, /) -> None:
        """ncclSend."""
        _told(self._nccl.send, buffer, n, dtype, peer, self._comm, stream)

    def recv(self, buffer: int, n: int, dtype: int, peer: int, stream: int, /) -> None:
        """ncclRecv."""
        _told(self._nccl.recv, buffer, n, dtype, peer, self._comm, stream)

    def check_async_error(self) -> None:
        """Raises where a call has failed since, and `InProgress` while one is not through."""
        state = int(_told(self._nccl.comm_get_async_error, self._comm))
        if state == IN_PROGRESS:
            raise InProgress(state)
        _told(self._nccl.check_status, state)

    def abort(self) -> None:
        """Ends what is under way and frees the communicator."""
        _told(self._nccl.comm_abort, self._comm)
