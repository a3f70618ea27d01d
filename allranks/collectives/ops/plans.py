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
    Average,
    ReduceOp,
    check,
    name_of,
)
from allranks.collectives.calls.guard import Spec, describe_group, pack
from allranks.collectives.gpu.dlpack import ALIGNED
from allranks.collectives.host.shared_memory import keep
from allranks.collectives.world.group import Group
from allranks.errors import UsageError

Looks = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
"""The dtype and the shape of each array."""
_LINE = 64
"""Bytes: arrays of a group begin on such a boundary, so that TensorFlow can take their memory."""
_FEW = 8
"""Arrays on a GPU that are copied one by one, as cupy's ``concatenate`` does as well."""
_CUT = (
    "{} averages by default, and the average of integers is truncated towards zero. For the "
    "sum, pass op=Sum; for the exact average, pass floats."
)


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
        # Said here, as a plan is made once for many calls; and by one member for all.
        cut = op is Average and group.size > 1 and any(dtype.kind in "iu" for dtype in dtypes)
        if cut and group.me == 0:
            group.own.hint(_CUT.format(kind.removeprefix("grouped_")))
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
        self.batches = [
            Batch(where, [shapes[index] for index in where], self.hows[where[0]], device)
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
        self, where: list[int], shapes: list[tuple[int, ...]], how: Arithmetic, device: str
    ) -> None:
        self.where, self.shapes, self.dtype = where, shapes, how.dtype
        self.in_one_copy = bool(device) and len(where) > _FEW
        # On a GPU what lies between a few of them costs more to fill than it saves later.
        line = _LINE if not device else ALIGNED if self.in_one_copy else 1
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

    def fill_in_one_copy(self, flat: Array, sources: Sequence[Array]) -> None:
        """The same for many arrays on a GPU: a launch for all of them, and not one for each.

        Source: cupy, cupy/_core/_routines_manipulation.pyx, _concatenate: one kernel for more than
        8 arrays of less than 2 MiB on average, otherwise a copy each.
        """
        ends = [start for start, _ in self.spans[1:]] + [self.size]
        gaps = [after - end for (_, end), after in zip(self.spans, ends, strict=True)]
        zeros = np.zeros_like(flat, shape=(max(gaps),))
        pairs = zip(sources, gaps, strict=True)
        pieces = [piece for source, gap in pairs for piece in (source.reshape(-1), zeros[:gap])]
        np.concatenate([piece for piece in pieces if piece.size] or [zeros], out=flat)
        if not self.staging.copies:
            self.staging.staged(flat, flat)


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
