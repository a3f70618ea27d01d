"""Ranks as threads of one process: algorithms run without MPI, in tests and in lessons."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from allranks.collectives.ring.link import Array
from allranks.collectives.start.loopback import together
from allranks.errors import CollectiveError, RankLeft

T = TypeVar("T")


class LoopbackLinks:
    """One link per rank, all in this process; ``run`` gives each rank a thread.

    Args:
        size: number of ranks, at least 1.
        timeout_seconds: how long a receive waits before it is given up as never coming.

    Example:
        >>> links = LoopbackLinks(4)
        >>> links.run(lambda link: ring_allreduce(np.arange(8) + link.rank, link))
    """

    def __init__(self, size: int, timeout_seconds: float = 10.0) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.mailboxes: dict[tuple[int, int], SimpleQueue[Array | RankLeft]] = {
            (sender, receiver): SimpleQueue() for sender in range(size) for receiver in range(size)
        }
        self._links = [LoopbackLink(self, rank) for rank in range(size)]

    def __getitem__(self, rank: int) -> LoopbackLink:
        return self._links[rank]

    def run(self, function: Callable[[LoopbackLink], T]) -> list[T]:
        """What ``function(link)`` returned on each rank, in the order of ranks.

        Raises:
            BaseException: what the first failing rank raised; ranks that waited for it get
                ``RankLeft`` and end too. The links are of no use afterwards.
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
        """The array received from one rank while ``array`` goes to another."""
        self.send(send_to, array)
        return self.receive(receive_from)

    def send(self, to: int, array: Array) -> None:
        """A copy of ``array`` is in the mailbox of rank ``to``."""
        self._links.mailboxes[self.rank, to].put(array.copy())

    def receive(self, from_: int) -> Array:
        """The next array that rank ``from_`` sent to this rank.

        Raises:
            RankLeft: rank ``from_`` raised.
            CollectiveError: nothing came before the time-out.
        """
        links = self._links
        try:
            message = links.mailboxes[from_, self.rank].get(timeout=links.timeout_seconds)
        except Empty:
            raise CollectiveError(
                f"rank {self.rank} expected an array from rank {from_}: none came in "
                f"{links.timeout_seconds} s. Check that both ranks run the same algorithm."
            ) from None
        if isinstance(message, RankLeft):
            raise message
        return message
