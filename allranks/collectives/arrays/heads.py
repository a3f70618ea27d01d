"""What is told of an array ahead of its bytes, where the other side cannot know."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Made here, because a cell may replace what json holds.
_dumps = json.JSONEncoder().encode
_loads = json.JSONDecoder().decode


class Head(NamedTuple):
    """An array's dtype and shape, and where it lies."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = ""

    def pack(self, width: int = 0) -> NDArray[np.uint8]:
        """The head as bytes, at least ``width`` of them."""
        return np.frombuffer(_dumps(self).encode().ljust(width), np.uint8)

    @classmethod
    def unpack(cls, data: NDArray[np.uint8]) -> Head:
        """The head that `pack` was called on."""
        dtype, shape, device = _loads(data.tobytes().decode())
        return cls(dtype, tuple(shape), device)
