"""Adasum: gradients added as far as they are orthogonal, averaged as far as they are parallel.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, equation 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def adasum(
    parts: list[NDArray[Any]], prescale: float = 1.0, postscale: float = 1.0
) -> NDArray[Any]:
    """The combination of all parts, a power of two of shape (n,), pairwise in a tree, in float64.

    Every rank holds all parts, so this takes as many times an array's memory as there are ranks.
    """
    level = [part.astype(np.float64) * prescale for part in parts]
    while len(level) > 1:
        level = [_pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return (level[0] * postscale).astype(parts[0].dtype)


def _pair(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    dot, squared_a, squared_b = np.dot(a, b), np.dot(a, a), np.dot(b, b)
    keep_a = 1.0 - dot / (2.0 * squared_a) if squared_a else 1.0
    keep_b = 1.0 - dot / (2.0 * squared_b) if squared_b else 1.0
    result: NDArray[Any] = keep_a * a + keep_b * b
    return result
