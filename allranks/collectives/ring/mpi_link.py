"""A link over MPI that never blocks: every operation is posted, then polled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from allranks.collectives.arrays.libraries import to_dtype
from allranks.collectives.calls.wait import Pause
from allranks.collectives.ring.link import Array

if TYPE_CHECKING:
    from mpi4py import MPI

HEADER_TAG, DATA_TAG = 1, 2

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "bfloat16",
)  # fmt: skip

Wait = Callable[[Sequence[Any]], object]


def poll(requests: Sequence[Any]) -> None:
    """The requests are complete; an interrupt is heard while they are not."""
    pause = Pause()
    while not all(request.Test() for request in requests):
        pause()


class MpiLink:
    """This rank's link to the other ranks of an MPI communicator.

    An array travels as two messages: sixteen bytes that name its dtype and length, then its
    bytes. What a left wait leaves behind stays in ``unfinished``, so that MPI never writes to
    memory that has been freed.

    Args:
        comm: a communicator of its own (``comm.Dup()``): other traffic would be mistaken for ours.
        wait: called with posted requests, returns when all are complete; it may raise.
    """

    def __init__(self, comm: MPI.Intracomm, wait: Wait = poll) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.unfinished: dict[int, object] = {}
        self._wait = wait

    def exchange(self, send_to: int, array: Array, receive_from: int) -> Array:
        """The array received from one rank while ``array`` goes to another."""
        sending = self._post_send(send_to, array)
        received = self.receive(receive_from)
        self._finish(sending)
        return received

    def send(self, to: int, array: Array) -> None:
        """``array`` has left; rank ``to`` may still have to receive it."""
        self._finish(self._post_send(to, array))

    def receive(self, from_: int) -> Array:
        """The next array that rank ``from_`` sent to this rank."""
        header = np.empty(2, np.int64)
        self._finish(self._keep([self.comm.Irecv(header, from_, HEADER_TAG)], header))
        code, count = header.tolist()
        array = np.empty(count, to_dtype(DTYPES[code]))
        data = array.view(np.uint8)
        self._finish(self._keep([self.comm.Irecv(data, from_, DATA_TAG)], data))
        return array

    def _post_send(self, to: int, array: Array) -> list[Any]:
        array = np.ascontiguousarray(array)
        header = np.array([_code(array.dtype.name), array.size], np.int64)
        data = array.view(np.uint8)
        requests = [self.comm.Isend(header, to, HEADER_TAG), self.comm.Isend(data, to, DATA_TAG)]
        return self._keep(requests, header, data)

    def _keep(self, requests: list[Any], *buffers: Array) -> list[Any]:
        self.unfinished[id(requests)] = (requests, buffers)
        return requests

    def _finish(self, requests: list[Any]) -> None:
        self._wait(requests)
        del self.unfinished[id(requests)]


def _code(name: str) -> int:
    if name not in DTYPES:
        raise TypeError(f"an MPI link carries {', '.join(DTYPES)}: found {name}. Convert first.")
    return DTYPES.index(name)
