"""FAKE cupyx, beside the fake cupy."""

import numpy as np


def empty_pinned(shape, dtype=float, order="C"):
    return np.empty(shape, dtype, order)
