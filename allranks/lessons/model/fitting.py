"""Fits α and β of a cluster to timed allreduces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, combinations
from math import inf

import numpy as np
from numpy.typing import NDArray

from allranks.lessons.model.costs import Fabric, Latency, Protocol, Share, terms

FITTED = ("ring", "recursive doubling", "tree")


@dataclass(frozen=True)
class Measurement:
    """One timed allreduce."""

    nbytes: int
    seconds: float
    ranks: int
    hosts: int = 1
    # The algorithm that ran, or the one that the model uses for it.
    algorithm: str = "ring"


def fit(
    measurements: Iterable[Measurement | tuple[int, float]],
    ranks: int | None = None,
    hosts: int = 1,
    algorithm: str = "ring",
    name: str = "this cluster",
) -> Fabric:
    """Returns the fabric whose α and β fit the measurements best, by relative error.

    The error is relative, so that 20 µs at 4 B count as much as 20 ms at 64 MB. A latency or a
    time per byte is never negative (non-negative least squares). If long arrays took no longer
    than short ones, the fitted time per byte is 0; ``relative_error`` measures how well that fits.

    Args:
        measurements: records, or pairs (nbytes, seconds) that share the arguments below. Two
            sizes are enough; a few from 4 B to 64 MB are better. Take the shortest of several
            times, because other load on the host only adds time.
        ranks: number of ranks the pairs were measured with.
        hosts: number of hosts the pairs were measured with.
        algorithm: the one that ran when the pairs were measured, or one to use for it.
        name: the fabric's name in predictions.

    Returns:
        A fabric with its ``relative_error``. Links that the measurements did not use are
        unknown, and ``predict`` raises if it needs them.

    Raises:
        ValueError: there are fewer than two measurements, or only measurements of single ranks.
    """
    records = [_record(item, ranks, hosts, algorithm) for item in measurements]
    counts = [terms(m.algorithm, m.nbytes, m.ranks, m.hosts) for m in records]
    table = np.array(
        [(c.inside, c.between, c.inside_nbytes, c.between_nbytes) for c in counts], np.float64
    ).reshape(-1, 4)
    seconds = np.array([m.seconds for m in records])
    if len(records) < 2 or not table.any() or (seconds <= 0).any():
        raise ValueError(
            "a fit needs at least two positive times of allreduces over two or more ranks: "
            f"found {len(records)} measurements. Time a small and a large array."
        )
    relative = table / seconds[:, None]
    solution = nonnegative_least_squares(relative, np.ones(len(records)))
    error = float(np.sqrt(np.mean((relative @ solution - 1) ** 2)))
    alpha_inside, alpha_between, beta_inside, beta_between = solution.tolist()
    latency = Latency(
        inside=alpha_inside if table[:, 0].any() else None,
        between=alpha_between if table[:, 1].any() else None,
    )
    return Fabric(
        name=f"{name}, fitted to {len(records)} measurements within {error:.1%}",
        protocols=(
            Protocol("measured", dict.fromkeys(FITTED, latency), dict.fromkeys(FITTED, Share())),
        ),
        inside_bandwidth=_bandwidth(beta_inside) if table[:, 2].any() else None,
        between_bandwidth=_bandwidth(beta_between) if table[:, 3].any() else None,
        relative_error=error,
    )


def _bandwidth(beta: float) -> float:
    # Long arrays took no longer than short ones: the time per byte was not measurable.
    return 1 / beta if beta else inf


def nonnegative_least_squares(
    matrix: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the x ≥ 0 that minimises |matrix · x - target|, exactly.

    An ordinary least-squares solution of every subset of the columns is tried (16 subsets for four
    columns), because an iteration might not converge.
    """
    columns = matrix.shape[1]
    best = np.zeros(columns)
    least = float(np.sum(target**2))
    # Columns differ by many powers of ten (a message, a byte), so each is scaled to 1 first.
    scale = np.where(matrix.any(axis=0), np.abs(matrix).max(axis=0, initial=0), 1.0)
    lengths = range(1, columns + 1)
    for subset in chain.from_iterable(combinations(range(columns), n) for n in lengths):
        chosen = matrix[:, subset] / scale[list(subset)]
        part, *_ = np.linalg.lstsq(chosen, target, rcond=None)
        residual = float(np.sum((chosen @ part - target) ** 2))
        if (part >= 0).all() and residual < least * (1 - 1e-12):
            best, least = np.zeros(columns), residual
            best[list(subset)] = part / scale[list(subset)]
    return best


def _record(
    item: Measurement | tuple[int, float], ranks: int | None, hosts: int, algorithm: str
) -> Measurement:
    if isinstance(item, Measurement):
        return item
    if ranks is None:
        raise ValueError(
            "pairs (nbytes, seconds) need the number of ranks they were measured with: "
            "found none. Pass ranks=, or Measurement records."
        )
    return Measurement(*item, ranks, hosts, algorithm)
