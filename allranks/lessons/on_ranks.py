"""An allreduce on the ranks of a cell: its steps, its time, and the cost model's prediction."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from allranks.collectives import world
from allranks.collectives.start import runtime
from allranks.lessons.links import Array
from allranks.lessons.model import Measurement, fit, predict
from allranks.lessons.records import Explained
from allranks.lessons.ring import Algorithm, Recorder, collect, find, tree_allreduce

# Sizes that the model is fitted to. The explained array is not one of them, so that its prediction
# can be wrong.
_FITTED_NBYTES = (4 << 10, 64 << 10, 512 << 10)
_REPEATS = 15
_LEAST_REPEATS = 3
# Limit for all sizes together; a slow machine times fewer allreduces.
_SECONDS = 0.6

# Above the tags of `send` and `recv`, so that it never matches a cell's messages.
_TAG = 1 << 15


class CellLink:
    """This rank's link to the first ``size`` ranks, over the cell's ``comm``.

    Ctrl-C ends a wait, and if a rank leaves the cell the others raise `RankLeft`.
    """

    def __init__(self, size: int) -> None:
        self.rank = runtime.rank()
        self.size = size
        self._comm = runtime.communicator()

    def exchange(self, send_to: int, array: Array, receive_from: int) -> Array:
        received: Array = self._comm.sendrecv(
            array, send_to, _TAG, source=receive_from, recvtag=_TAG
        )
        return received

    def send(self, to: int, array: Array) -> None:
        self._comm.send(array, to, _TAG)

    def receive(self, from_: int) -> Array:
        received: Array = self._comm.recv(source=from_, tag=_TAG)
        return received


def explain_here(algorithm: str, values: Sequence[Sequence[float]]) -> Explained | None:
    """Returns the run, its time and its prediction on rank 0; None on the other ranks.

    ``values`` has one array of the same length per rank; further ranks do not take part.
    Collective over the ranks with values.
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
    return Explained(run, seconds, repeats, prediction)


def _time(allreduce: Algorithm, arrays: Sequence[Array], link: CellLink) -> tuple[list[float], int]:
    # A first call of each that is not timed: it pays for memory and connections.
    for array in arrays:
        allreduce(array, link, "sum", None)
    rounds: list[list[float]] = []
    spent = 0.0
    while len(rounds) < _LEAST_REPEATS or (len(rounds) < _REPEATS and spent < _SECONDS):
        # Every round times all arrays, so that other load on the host affects all sizes alike.
        rounds.append([_once(allreduce, array, link) for array in arrays])
        spent += sum(rounds[-1])
    # The minimum, because other load on the host only adds time.
    return [min(taken) for taken in zip(*rounds, strict=True)], len(rounds)


def _once(allreduce: Algorithm, array: Array, link: CellLink) -> float:
    tree_allreduce(np.zeros(1), link)  # a barrier
    began = perf_counter()
    allreduce(array, link, "sum", None)
    slowest = tree_allreduce(np.array([perf_counter() - began]), link, "max")
    return float(slowest[0])
