"""A link between the ranks of a cell, whose every wait can be left."""

from __future__ import annotations

from allranks.collectives.ring.link import Array
from allranks.collectives.start import runtime

_TAG = 1 << 15
"""Beyond the tags of ``send`` and ``recv``, so that messages of cells keep off ours."""


class CellLink:
    """This rank's link to the first ``size`` ranks, over the communicator that every cell has.

    Ctrl-C is heard, and a rank that leaves the cell makes the others raise `RankLeft`.

    Args:
        size: how many ranks are linked, from rank 0 on; all of them run the cell.
    """

    def __init__(self, size: int) -> None:
        self.rank = runtime.rank()
        self.size = size
        self._comm = runtime.communicator()

    def exchange(self, send_to: int, array: Array, receive_from: int) -> Array:
        """The array received from one rank while ``array`` goes to another (or the same)."""
        received: Array = self._comm.sendrecv(
            array, send_to, _TAG, source=receive_from, recvtag=_TAG
        )
        return received

    def send(self, to: int, array: Array) -> None:
        """``array`` is on its way to rank ``to``."""
        self._comm.send(array, to, _TAG)

    def receive(self, from_: int) -> Array:
        """The next array that rank ``from_`` sent to this rank."""
        received: Array = self._comm.recv(source=from_, tag=_TAG)
        return received
