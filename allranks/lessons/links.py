"""Links: the messages of an algorithm, over MPI or between threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.arrays.libraries import to_dtype
from allranks.collectives.calls.call import Pause
from allranks.collectives.loopback import together
from allranks.errors import CollectiveError, RankLeft

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
Array = NDArray[Any]
Wait = Callable[[Sequence[Any]], object]

HEADER_TAG, DATA_TAG = 1, 2
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "bfloat16",
)  # fmt: skip


class Link(Protocol):
    """One rank's connection to the others. Arrays that travel are one-dimensional.

    Messages between the same two ranks arrive in the order in which they were sent.
    """

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """The number of linked ranks."""

    def exchange(self, send_to: int, array: Array, receive_from: int) -> Array:
        """Sends ``array`` to one rank and returns the array received from another, or the same."""

    def send(self, to: int, array: Array) -> None:
        """Sends ``array`` to rank ``to``; the array may be overwritten after the call."""

    def receive(self, from_: int) -> Array:
        """Returns the next array that rank ``from_`` sent to this rank."""


def poll(requests: Sequence[Any]) -> None:
    # Tests in a loop, so that an interrupt ends the wait.
    pause = Pause()
    while not all(request.Test() for request in requests):
        pause()


class MpiLink:
    """This rank's link to the other ranks of a communicator. No operation blocks inside MPI.

    An array travels as two messages: sixteen bytes with its dtype and length, then its bytes.
    If a wait raises, its requests and buffers stay in ``unfinished``, because MPI may still write
    to them.

    Args:
        comm: a communicator for this link only (``comm.Dup()``), because other messages could
            match these.
        wait: called with posted requests; returns when all are complete, or raises.
    """

    def __init__(self, comm: MPI.Intracomm, wait: Wait = poll) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.unfinished: dict[int, object] = {}
        self._wait = wait

    def exchange(self, send_to: int, array: Array, receive_from: int) -> Array:
        """Sends ``array`` to one rank and returns the array received from another."""
        sending = self._post_send(send_to, array)
        received = self.receive(receive_from)
        self._finish(sending)
        return received

    def send(self, to: int, array: Array) -> None:
        """Sends ``array``; returns when it may be overwritten, perhaps before it is received."""
        self._finish(self._post_send(to, array))

    def receive(self, from_: int) -> Array:
        """Returns the next array that rank ``from_`` sent to this rank."""
        header = np.empty(2, np.int64)
        self._finish(self._keep([self.comm.Irecv(header, from_, HEADER_TAG)], header))
        code, count = header.tolist()
        array = np.empty(count, to_dtype(DTYPES[code]))
        data = array.view(np.uint8)
        self._finish(self._keep([self.comm.Irecv(data, from_, DATA_TAG)], data))
        return array

    def _post_send(self, to: int, array: Array) -> list[Any]:
        array = np.ascontiguousarray(array)
        name = array.dtype.name
        if name not in DTYPES:
            raise TypeError(
                f"an MPI link carries {', '.join(DTYPES)}: found {name}. Convert first."
            )
        header = np.array([DTYPES.index(name), array.size], np.int64)
        data = array.view(np.uint8)
        requests = [self.comm.Isend(header, to, HEADER_TAG), self.comm.Isend(data, to, DATA_TAG)]
        return self._keep(requests, header, data)

    def _keep(self, requests: list[Any], *buffers: Array) -> list[Any]:
        self.unfinished[id(requests)] = (requests, buffers)
        return requests

    def _finish(self, requests: list[Any]) -> None:
        self._wait(requests)
        del self.unfinished[id(requests)]


class LoopbackLinks:
    """One link per rank, all in this process: ``run`` gives each rank a thread.

    Args:
        size: number of ranks, at least 1.
        timeout_seconds: how long a receive waits before it fails; None for as long as it takes.

    Example:
        >>> links = LoopbackLinks(4)
        >>> links.run(lambda link: ring_allreduce(np.arange(8) + link.rank, link))
    """

    def __init__(self, size: int, timeout_seconds: float | None = 10.0) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.mailboxes: dict[tuple[int, int], SimpleQueue[Array | RankLeft]] = {
            (sender, receiver): SimpleQueue() for sender in range(size) for receiver in range(size)
        }
        self._links = [LoopbackLink(self, rank) for rank in range(size)]

    def __getitem__(self, rank: int) -> LoopbackLink:
        return self._links[rank]

    def run(self, function: Callable[[LoopbackLink], T]) -> list[T]:
        """Returns the result of ``function(link)`` on each rank, in the order of ranks.

        Raises:
            BaseException: the exception of the first rank that failed. Ranks that waited for it
                get ``RankLeft`` and end too. Do not use the links afterwards.
        """
        return together(self._links, function, self._leave)

    def _leave(self, link: LoopbackLink, error: BaseException) -> None:
        rank = link.rank
        for receiver in range(self.size):
            self.mailboxes[rank, receiver].put(
                RankLeft(
                    f"rank {receiver} expected an array from rank {rank}: rank {rank} raised "
                    f"{type(error).__name__}: {error}. Fix rank {rank} first."
                )
            )


class LoopbackLink:
    """One rank's link to the other ranks of the same process."""

    def __init__(self, links: LoopbackLinks, rank: int) -> None:
        self._links = links
        self.rank, self.size = rank, links.size

    def exchange(self, send_to: int, array: Array, receive_from: int) -> Array:
        self.send(send_to, array)
        return self.receive(receive_from)

    def send(self, to: int, array: Array) -> None:
        # A copy, as MPI would make one: the sender may overwrite its array.
        self._links.mailboxes[self.rank, to].put(array.copy())

    def receive(self, from_: int) -> Array:
        links = self._links
        try:
            message = links.mailboxes[from_, self.rank].get(timeout=links.timeout_seconds)
        except Empty:
            raise CollectiveError(
                f"rank {self.rank} expected an array from rank {from_}: none came in "
                f"{links.timeout_seconds} s. Check that both ranks run the same algorithm."
            ) from None
        # Rank `from_` raised.
        if isinstance(message, RankLeft):
            raise message
        return message
