"""What reductions of the same kind, dtypes and shapes have in common, worked out once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from allranks.collectives.arrays.reductions import (
    Adasum,
    Arithmetic,
    Array,
    ReduceOp,
    check,
    name_of,
)
from allranks.collectives.calls.guard import Spec, describe_group, pack
from allranks.collectives.host.shared import keep
from allranks.collectives.world.group import Group
from allranks.errors import UsageError

Looks = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
"""The dtype and the shape of each array."""
_LINE = 64
"""Bytes: arrays of a group begin on such a boundary, so that TensorFlow can take their memory."""


class Plan:
    """How a group carries out reductions of one kind."""

    def __init__(
        self,
        group: Group,
        kind: str,
        op: ReduceOp,
        looks: Looks,
        factors: tuple[float, float],
        root: int = -1,
        compression: str = "",
        labels: Sequence[str] = (),
        transport: str = "",
        device: str = "",
    ) -> None:
        dtypes, shapes = [dtype for dtype, _ in looks], [shape for _, shape in looks]
        for dtype in dtypes:
            check(op, dtype)
        _check_shapes(kind, op, shapes, group.size)
        self.op, self.factors = op, factors
        self.transport, self.move = group.through_host.name, group.through_host.allreduce
        """How one array goes where nothing else is asked for, and it is not on a GPU."""
        sizes = [math.prod(shape) for shape in shapes]
        self.nbytes = sum(n * dtype.itemsize for n, dtype in zip(sizes, dtypes, strict=True))
        self.hows: list[Arithmetic] = []
        found: dict[np.dtype[Any], list[int]] = {}
        # Adasum's is its own, and it takes one array after the other.
        for index, dtype in enumerate(dtypes if op is not Adasum else ()):
            found.setdefault(dtype, []).append(index)
            self.hows.append(Arithmetic(op, dtype, group.size, *factors))
        # On a GPU nothing is taken over that has to be aligned.
        line = 1 if device else _LINE
        self.batches = [
            Batch(where, [shapes[index] for index in where], self.hows[where[0]], line)
            for where in found.values()
        ]
        """The arrays of each dtype, which move as one."""
        whole = kind == "grouped_allreduce" and op is not Adasum
        names, shown = describe_group([name_of(dtype) for dtype in dtypes], shapes, labels)
        shape = shown if kind.startswith("grouped") else shapes[0]
        elements = sum(batch.size for batch in self.batches) if whole else sum(sizes)
        self.packed = pack(
            Spec(kind, op.name, names, shape, root, *factors, compression, elements,
                 transport, device)
        )  # fmt: skip


class Batch:
    """Arrays of one dtype, laid out one after the other."""

    def __init__(
        self, where: list[int], shapes: list[tuple[int, ...]], how: Arithmetic, line: int
    ) -> None:
        self.where, self.shapes, self.dtype = where, shapes, how.dtype
        step = max(1, line // how.dtype.itemsize) if len(where) > 1 else 1
        self.spans: list[tuple[int, int]] = []
        self.size = 0
        for shape in shapes:
            end = self.size + math.prod(shape)
            self.spans.append((self.size, end))
            self.size = -(-end // step) * step
        self.staging = self.how = how
        if len(where) > 1 and not how.half:
            # They are prescaled on their way here: once, whatever the transport copies.
            self.how = how.unscaled()

    def parts(self, flat: Array) -> list[Array]:
        """The arrays that lie in ``flat``."""
        return [
            flat[start:end].reshape(shape)
            for (start, end), shape in zip(self.spans, self.shapes, strict=True)
        ]

    def fill(self, flat: Array, parts: list[Array], sources: Sequence[Array]) -> None:
        """Copies the arrays in; what lies between two of them is reduced as well."""
        ends = [start for start, _ in self.spans[1:]] + [self.size]
        for part, source, (_, end), after in zip(parts, sources, self.spans, ends, strict=True):
            self.staging.staged(source, part)
            if end < after:
                flat[end:after] = 0


def plan_of(group: Group, kind: str, op: ReduceOp, looks: Looks, *options: Any) -> Plan:
    """The plan of a reduction, made where the group has none; ``options`` as `Plan` takes them."""
    key = (kind, op._value_, looks, *options)
    plan: Plan | None = group.plans.get(key)
    return plan or keep(group.plans, key, Plan(group, kind, op, looks, *options))


def _check_shapes(kind: str, op: ReduceOp, shapes: list[tuple[int, ...]], size: int) -> None:
    if op is Adasum and (size & (size - 1) or "reducescatter" in kind):
        raise UsageError(
            f"Adasum needs allreduce on a number of ranks that is a power of two: found {kind} "
            f"on {size}. Use Average."
        )
    if "reducescatter" in kind and () in shapes:
        raise UsageError(
            "reducescatter needs a first dimension to cut: found a scalar. "
            "Use allreduce, or reshape(1)."
        )
