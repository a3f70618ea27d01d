"""Many arrays reduced as one, in memory that the ranks of a host share. Runs in every rank."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks import collectives
from allranks.collectives import Adasum, ProcessSet, ReduceOp
from allranks.collectives.calls.guard import describe_group
from allranks.collectives.ops.reducing import allreduce_fused

Array = NDArray[Any]
Structure = tuple[tuple[tuple[tuple[int, ...], np.dtype[Any]], ...], tuple[str, ...]]
_LINE = 64
"""Bytes: arrays begin on such a boundary, so that TensorFlow can take their memory over."""
_KEPT = 4


class Buffer:
    """Room for arrays of one dtype, one after the other."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any], labels: Sequence[str]
    ) -> None:
        step = max(1, _LINE // dtype.itemsize)
        self._shapes = list(shapes)
        _, self.looks = describe_group([dtype.name] * len(shapes), shapes, labels)
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

    def __init__(self, arrays: Sequence[Array], labels: Sequence[str]) -> None:
        self.lock = threading.Lock()
        found: dict[np.dtype[Any], list[int]] = {}
        for index, array in enumerate(arrays):
            found.setdefault(array.dtype, []).append(index)
        self.groups = [
            (
                where,
                Buffer(
                    [arrays[index].shape for index in where],
                    dtype,
                    [labels[index] for index in where] if labels else (),
                ),
            )
            for dtype, where in found.items()
        ]

    def reduce(self, arrays: Sequence[Array], op: ReduceOp, **options: Any) -> list[Array]:
        """The reductions; they share the memory of one new array a dtype."""
        outs: list[Any] = [None] * len(arrays)
        with self.lock:
            for where, buffer in self.groups:
                buffer.fill([arrays[index] for index in where])
                total = allreduce_fused(buffer.flat, buffer.looks, op, **options)
                for index, part in zip(where, buffer.parts(total), strict=True):
                    outs[index] = part
        return outs


_fusions: OrderedDict[Structure, Fusion] = OrderedDict()


def forget() -> None:
    """Gives the buffers back."""
    _fusions.clear()


def allreduce(
    arrays: Sequence[Array],
    op: ReduceOp,
    process_set: ProcessSet | None = None,
    labels: tuple[str, ...] = (),
    **options: Any,
) -> list[Array]:
    """Every rank gets the reductions of its arrays, in as few calls as there are dtypes.

    The ranks compare the shapes of all arrays in every call, as one number made beforehand.

    Args:
        arrays: the same shapes and dtypes on every rank; some may be tensors on a GPU.
        op: as in `allranks.collectives.allreduce`.
        process_set: whose ranks take part.
        labels: one an array, the same on every rank: tells it from others of its shape.
        **options: as in `allranks.collectives.allreduce`.

    Collective over the process set.
    """
    if not arrays:
        return []
    options["process_set"] = process_set
    if op is Adasum or not all(isinstance(array, np.ndarray) for array in arrays):
        # On a GPU they are joined without a buffer that the ranks share.
        return collectives.grouped_allreduce(arrays, op, labels=labels, **options)
    structure = tuple([(array.shape, array.dtype) for array in arrays]), labels
    fusion = _fusions.pop(structure, None) or Fusion(arrays, labels)
    _fusions[structure] = fusion
    while len(_fusions) > _KEPT:
        _fusions.popitem(last=False)
    return fusion.reduce(arrays, op, **options)
