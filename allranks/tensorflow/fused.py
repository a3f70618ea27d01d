"""Many arrays reduced as one, in memory that the ranks of a host share. Runs in every rank."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks import collectives
from allranks.collectives import Adasum, ProcessSet, ReduceOp, world

Array = NDArray[Any]
Structure = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
_LINE = 64
"""Bytes: arrays begin on such a boundary, so that TensorFlow can take their memory over."""
_KEPT = 4


class Buffer:
    """Room for arrays of one dtype, one after the other."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> None:
        step = max(1, _LINE // dtype.itemsize)
        self._shapes = list(shapes)
        self._spans: list[tuple[int, int]] = []
        start = 0
        for shape in shapes:
            size = int(np.prod(shape))
            self._spans.append((start, start + size))
            start += -(-size // step) * step
        self.flat = collectives.empty(start, dtype)
        self.flat[:] = 0  # what lies between two arrays is reduced as well
        self._parts = self.parts(self.flat)

    def fill(self, arrays: Sequence[Array]) -> None:
        """Copies the arrays in."""
        for part, array in zip(self._parts, arrays, strict=True):
            np.copyto(part, array)

    def parts(self, flat: Array) -> list[Array]:
        """The arrays that lie in ``flat``, which is laid out as this is."""
        return [
            flat[start:end].reshape(shape)
            for (start, end), shape in zip(self._spans, self._shapes, strict=True)
        ]


class Fusion:
    """The dense arrays of one step: what they look like, and a buffer for each dtype."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.lock = threading.Lock()
        found: dict[np.dtype[Any], list[int]] = {}
        for index, array in enumerate(arrays):
            found.setdefault(array.dtype, []).append(index)
        self.groups = [
            (where, Buffer([arrays[index].shape for index in where], dtype))
            for dtype, where in found.items()
        ]

    def reduce(self, arrays: Sequence[Array], op: ReduceOp, **options: Any) -> list[Array]:
        """The reductions; they share the memory of one new array a dtype."""
        outs: list[Any] = [None] * len(arrays)
        with self.lock:
            for where, buffer in self.groups:
                buffer.fill([arrays[index] for index in where])
                total = collectives.allreduce(buffer.flat, op, **options)
                for index, part in zip(where, buffer.parts(total), strict=True):
                    outs[index] = part
        return outs


_fusions: OrderedDict[Structure, Fusion] = OrderedDict()
_agreed: dict[tuple[int, int], set[tuple[object, ...]]] = {}
"""What the ranks have agreed on, in one epoch and one cell: another may begin with other ranks."""


def forget() -> None:
    """Gives the buffers back."""
    _fusions.clear()
    _agreed.clear()


def disagree() -> None:
    """Lets the ranks agree again, as some of them were not there."""
    _agreed.clear()


def allreduce(
    arrays: Sequence[Array],
    op: ReduceOp,
    process_set: ProcessSet | None = None,
    **options: Any,
) -> list[Array]:
    """Every rank gets the reductions of its arrays, in as few calls as there are dtypes.

    The ranks agree on the arrays' shapes the first time in a cell that they meet them, and
    afterwards on the number of elements only: that costs nothing.

    Args:
        arrays: the same shapes and dtypes on every rank; some may be tensors on a GPU.
        op: as in `allranks.collectives.allreduce`.
        process_set: whose ranks take part.
        **options: as in `allranks.collectives.allreduce`.

    Collective over the process set.
    """
    if not arrays:
        return []
    options["process_set"] = process_set
    if not all(isinstance(array, np.ndarray) for array in arrays):
        # On a GPU, where they are joined without a buffer that the ranks share.
        return collectives.grouped_allreduce(arrays, op, **options)
    structure = tuple([(array.shape, array.dtype) for array in arrays])
    number = None if process_set is None else process_set.process_set_id
    known = structure, op, number, options.get("prescale_factor"), options.get("postscale_factor")
    when = collectives.epoch(), world.current().scope.number
    if op is Adasum or known not in _agreed.get(when, ()):
        outs = collectives.grouped_allreduce(arrays, op, **options)
        if when not in _agreed:
            _agreed.clear()
        _agreed.setdefault(when, set()).add(known)
        return outs
    fusion = _fusions.pop(structure, None) or Fusion(arrays)
    _fusions[structure] = fusion
    while len(_fusions) > _KEPT:
        _fusions.popitem(last=False)
    return fusion.reduce(arrays, op, **options)
