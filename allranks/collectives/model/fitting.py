"""α and β of the cluster at hand, from timed allreduces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, combinations
from math import inf

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.model.cost import terms
from allranks.collectives.model.fabric import Fabric, Latency, Protocol, Share

FITTED = ("ring", "recursive doubling", "tree")


@dataclass(frozen=True)
class Measurement:
    """One timed allreduce."""

    nbytes: int
    seconds: float
    ranks: int
    hosts: int = 1
    algorithm: str = "ring"
    """The algorithm that ran, or the one to take it for."""


def fit(
    measurements: Iterable[Measurement | tuple[int, float]],
    ranks: int | None = None,
    hosts: int = 1,
    algorithm: str = "ring",
    name: str = "this cluster",
) -> Fabric:
    """A fabric whose α and β come closest to the measurements, in relative error.

    Relative, so that 20 µs at 4 B weigh as much as 20 ms at 64 MB. A latency or a time per
    byte is never negative (non-negative least squares). Where long arrays took no longer than
    short ones, bytes cost nothing, and the error says how well that holds.

    Args:
        measurements: records, or pairs (nbytes, seconds) that share the arguments below. Two
            sizes are enough; a few from 4 B to 64 MB are better. Take the shortest of several
            times: what else the host does only adds to them.
        ranks: number of ranks the pairs were measured with.
        hosts: number of hosts the pairs were measured with.
        algorithm: what ran when the pairs were measured, or what to take it for.
        name: what predictions shall call the fabric.

    Returns:
        A fabric with its ``relative_error``. Links that the measurements never used are
        unknown, and ``predict`` refuses to guess them.

    Raises:
        ValueError: there are fewer than two measurements, or nothing but single ranks.
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
    # Measured, and long arrays took no longer than short ones: bytes cost nothing that was seen.
    return 1 / beta if beta else inf


def nonnegative_least_squares(
    matrix: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The x ≥ 0 that minimises |matrix · x - target|; exact, for a handful of columns.

    The solution is an ordinary least-squares solution on the columns that are not zero: all
    subsets are tried (16 for four columns), so that no iteration can fail to converge. ``matrix``
    has the shape (rows, columns), ``target`` (rows,), and x (columns,).
    """
    columns = matrix.shape[1]
    best = np.zeros(columns)
    least = float(np.sum(target**2))
    # Columns differ by many powers of ten (a message against a byte): solve them scaled to one.
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
