"""What an algorithm needs of a network: send an array to a rank, receive one from a rank."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]


class Link(Protocol):
    """One rank's connection to the others; arrays that travel are one-dimensional.

    A message between two ranks never overtakes an earlier one between the same two.
    """

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """How many ranks are linked."""

    def exchange(self, send_to: int, array: Array, receive_from: int) -> Array:
        """The array received from one rank while ``array`` goes to another (or the same)."""

    def send(self, to: int, array: Array) -> None:
        """``array`` is on its way to rank ``to``; it may be overwritten after the call."""

    def receive(self, from_: int) -> Array:
        """The next array that rank ``from_`` sent to this rank."""
