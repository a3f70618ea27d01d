"""The array an algorithm works on, cut into chunks, and the recorder that watches it change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from allranks.collectives.ring.link import Array, Link
from allranks.records.steps import RankSteps, Scalar, Step, Values

Combine = Callable[..., Any]

OPS: dict[str, Combine] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


class NamedOp(Protocol):
    """A reduction that knows its name, such as the members of an enumeration."""

    @property
    def name(self) -> str:
        """The reduction's name; case does not matter."""


Op = str | NamedOp


def op_name(op: Op) -> str:
    """The lower-case name of a reduction given by name or as an object that has one."""
    name = (op if isinstance(op, str) else op.name).lower()
    if name not in OPS:
        raise ValueError(
            f"the algorithms reduce with one of {', '.join(OPS)}: found {name!r}. "
            "Use op='sum' and divide by the size for an average."
        )
    return name


class Recorder:
    """Keeps every step one rank takes part in; give one to a single allreduce.

    Args:
        limit: chunks with more elements are recorded as a summary.
    """

    def __init__(self, limit: int = 32) -> None:
        self.limit = limit
        self.steps: list[Step] = []
        self.part: RankSteps | None = None
        """This rank's part of the run; None until the allreduce has ended."""

    def values(self, array: Array) -> Values:
        """What ``array`` holds now: all of it, or four values and the extremes."""
        if array.size <= self.limit:
            return Values(array.size, tuple(map(plain, array.ravel().tolist())))
        head = tuple(map(plain, array.ravel()[:4].tolist()))
        return Values(array.size, head, plain(array.min().item()), plain(array.max().item()))


class Pieces:
    """One rank's working copy of its array, flattened and cut into ``count`` chunks.

    Args:
        array: any shape and dtype; it is copied, never changed.
        count: number of chunks; their lengths differ by at most one, and may be 0.
        recorder: when given, every change is recorded; without one nothing is copied or kept.
    """

    def __init__(
        self,
        array: Array,
        link: Link,
        *,
        count: int,
        algorithm: str,
        op: Op,
        recorder: Recorder | None,
    ) -> None:
        array = np.asarray(array)
        self.shape, self.flat = array.shape, array.flatten()
        self.edges = [index * self.flat.size // count for index in range(count + 1)]
        self.algorithm, self.op = algorithm, op_name(op)
        self.link, self.recorder = link, recorder
        self.input = recorder.values(self.flat) if recorder else None

    def __getitem__(self, chunk: int) -> Array:
        """A view of one chunk."""
        return self.flat[self.edges[chunk] : self.edges[chunk + 1]]

    def combine(self, chunk: int, received: Array, **step: Any) -> None:
        """The chunk is reduced with what was received."""
        before = self._look(self[chunk])
        OPS[self.op](self[chunk], received, out=self[chunk])
        self._record(chunk, before, received, **step)

    def replace(self, chunk: int, received: Array, **step: Any) -> None:
        """The chunk is what was received."""
        before = self._look(self[chunk])
        self[chunk][:] = received
        self._record(chunk, before, received, **step)

    def result(self) -> Array:
        """The array, back in its shape; the recorder's part is complete."""
        if self.recorder and self.input:
            self.recorder.part = RankSteps(
                algorithm=self.algorithm,
                op=self.op,
                rank=self.link.rank,
                size=self.link.size,
                dtype=self.flat.dtype.name,
                shape=self.shape,
                input=self.input,
                steps=tuple(self.recorder.steps),
                result=self.recorder.values(self.flat),
            )
        return self.flat.reshape(self.shape)

    def _look(self, array: Array) -> Values | None:
        return self.recorder.values(array) if self.recorder else None

    def _record(
        self,
        chunk: int,
        before: Values | None,
        received: Array,
        *,
        number: int,
        phase: str,
        sender: int,
    ) -> None:
        if self.recorder is None or before is None:
            return
        self.recorder.steps.append(
            Step(
                number=number,
                phase=phase,
                sender=sender,
                receiver=self.link.rank,
                chunk=chunk,
                start=self.edges[chunk],
                stop=self.edges[chunk + 1],
                nbytes=received.nbytes,
                before=before,
                received=self.recorder.values(received),
                after=self.recorder.values(self[chunk]),
            )
        )


def plain(value: Any) -> Scalar:
    """``value`` as JSON can carry it: numbers stay, complex and non-finite ones become text."""
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, complex):
        return str(value)
    return float(value) if math.isfinite(value) else str(value)
