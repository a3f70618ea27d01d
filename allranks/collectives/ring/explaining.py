"""An allreduce on the ranks of a cell: told step by step, timed, and foretold by the model."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.model import Measurement, fit, predict
from allranks.collectives.ring.link import Array
from allranks.collectives.ring.pieces import Recorder
from allranks.collectives.ring.story import Algorithm, collect, find
from allranks.collectives.ring.tree import tree_allreduce
from allranks.collectives.start import runtime
from allranks.records.explained import Explained

_FITTED_NBYTES = (4 << 10, 64 << 10, 512 << 10)
"""What the model is fitted to: never the array at hand, so that its prediction can fail."""
_REPEATS = 15
_LEAST_REPEATS = 3
_SECONDS = 0.6
"""For all sizes together; a slow machine times fewer allreduces."""

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


def explain_here(algorithm: str, values: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """An `Explained` as JSON carries it, on rank 0; None on the other ranks.

    Args:
        algorithm: a key of `ALGORITHMS`.
        values: one rank's array after the other, all of one length; as many ranks take part.

    Collective: ranks 0 to ``len(values) - 1`` call this with the same arguments.
    """
    link = CellLink(len(values))
    allreduce = find(algorithm)
    array = np.asarray(values)[link.rank]
    recorder = Recorder(limit=max(array.size, 1))
    allreduce(array, link, "sum", recorder)
    run = collect(recorder, link)
    others = [np.zeros(nbytes, np.uint8) for nbytes in _FITTED_NBYTES]
    (seconds, *times), repeats = _time(allreduce, [array, *others], link)
    hosts = len(set(world.current().hosts[: link.size]))
    measured = [
        Measurement(nbytes, taken, link.size, hosts, algorithm)
        for nbytes, taken in zip(_FITTED_NBYTES, times, strict=True)
    ]
    if run is None:
        return None
    fabric = fit(measured, name="these ranks")
    prediction = predict(array.nbytes, link.size, hosts, algorithm, fabric)
    return Explained(run, seconds, repeats, prediction).to_dict()


def _time(allreduce: Algorithm, arrays: Sequence[Array], link: CellLink) -> tuple[list[float], int]:
    """The shortest seconds of each array's allreduces, the same on every rank, and their number.

    What else a host does only makes them longer, and all arrays have their turn in every round: so
    a busy moment is not taken for the cost of one size.
    """
    for array in arrays:
        allreduce(array, link, "sum", None)
    rounds: list[list[float]] = []
    spent = 0.0
    while len(rounds) < _LEAST_REPEATS or (len(rounds) < _REPEATS and spent < _SECONDS):
        rounds.append([_once(allreduce, array, link) for array in arrays])
        spent += sum(rounds[-1])
    return [min(taken) for taken in zip(*rounds, strict=True)], len(rounds)


def _once(allreduce: Algorithm, array: Array, link: CellLink) -> float:
    tree_allreduce(np.zeros(1), link)  # all have arrived
    began = perf_counter()
    allreduce(array, link, "sum", None)
    slowest = tree_allreduce(np.array([perf_counter() - began]), link, "max")
    return float(slowest[0])
