"""An allreduce on the ranks of a cell: told step by step, timed, and foretold by the model."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from allranks.collectives import world
from allranks.collectives.algorithms.cell_link import CellLink
from allranks.collectives.algorithms.link import Array
from allranks.collectives.algorithms.pieces import Recorder
from allranks.collectives.algorithms.story import Algorithm, collect, find
from allranks.collectives.algorithms.tree import tree_allreduce
from allranks.collectives.model import Measurement, fit, predict
from allranks.records.explained import Explained

_FITTED_NBYTES = (4 << 10, 64 << 10, 512 << 10)
"""What the model is fitted to: never the array at hand, so that its prediction can fail."""
_REPEATS = 15
_LEAST_REPEATS = 3
_SECONDS = 0.15
"""For each size; a slow machine times fewer allreduces."""


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
    seconds, repeats = _time(allreduce, array, link)
    hosts = len(set(world.current().hosts[: link.size]))
    measured = [
        Measurement(nbytes, _time(allreduce, np.zeros(nbytes, np.uint8), link)[0], link.size, hosts,
                    algorithm)
        for nbytes in _FITTED_NBYTES
    ]  # fmt: skip
    if run is None:
        return None
    fabric = fit(measured, name="these ranks")
    prediction = predict(array.nbytes, link.size, hosts, algorithm, fabric)
    return Explained(run, seconds, repeats, prediction).to_dict()


def _time(allreduce: Algorithm, array: Array, link: CellLink) -> tuple[float, int]:
    """The median of a few allreduces' seconds, the same on every rank, and their number."""
    allreduce(array, link, "sum", None)
    taken: list[float] = []
    while len(taken) < _LEAST_REPEATS or (len(taken) < _REPEATS and sum(taken) < _SECONDS):
        tree_allreduce(np.zeros(1), link)  # all have arrived
        began = perf_counter()
        allreduce(array, link, "sum", None)
        slowest = tree_allreduce(np.array([perf_counter() - began]), link, "max")
        taken.append(float(slowest[0]))
    return median(taken), len(taken)
