"""The chunks of the array that an algorithm works on, and a recorder of their changes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from allranks.errors import CollectiveError
from allranks.lessons.ring.links import Array, Link
from allranks.records.lessons import AllreduceRun, RankSteps, Scalar, Step, Values

Combine = Callable[..., Any]

OPS: dict[str, Combine] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


class NamedOp(Protocol):
    """A reduction with a name, such as a member of an enumeration."""

    @property
    def name(self) -> str:
        """The reduction's name; case does not matter."""


Op = str | NamedOp


def op_name(op: Op) -> str:
    """Returns the lower-case name of a reduction."""
    name = (op if isinstance(op, str) else op.name).lower()
    if name not in OPS:
        raise ValueError(
            f"the algorithms reduce with one of {', '.join(OPS)}: found {name!r}. "
            "Use op='sum' and divide by the size for an average."
        )
    return name


class Recorder:
    """Records every step of one rank; use it for a single allreduce.

    Args:
        limit: chunks with more elements are recorded as a summary.
    """

    def __init__(self, limit: int = 32) -> None:
        self.limit = limit
        self.steps: list[Step] = []
        # This rank's part of the run; None until the allreduce has ended.
        self.part: RankSteps | None = None

    def values(self, array: Array) -> Values:
        """Returns the contents of ``array``: all values, or the first four and the extremes."""
        if array.size <= self.limit:
            return Values(array.size, tuple(map(plain, array.ravel().tolist())))
        head = tuple(map(plain, array.ravel()[:4].tolist()))
        return Values(array.size, head, plain(array.min().item()), plain(array.max().item()))


class Pieces:
    """One rank's working copy of its array, flattened and cut into ``count`` chunks.

    Args:
        array: any shape and dtype; it is copied, never changed.
        count: number of chunks; their lengths differ by at most one, and may be 0.
        recorder: records every change; None records and copies nothing.
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
        """Returns a view of one chunk."""
        return self.flat[self.edges[chunk] : self.edges[chunk + 1]]

    def combine(self, chunk: int, received: Array, **step: Any) -> None:
        """Reduces a chunk with the received array."""
        before = self._look(self[chunk])
        OPS[self.op](self[chunk], received, out=self[chunk])
        self._record(chunk, before, received, **step)

    def replace(self, chunk: int, received: Array, **step: Any) -> None:
        """Replaces a chunk by the received array."""
        before = self._look(self[chunk])
        self[chunk][:] = received
        self._record(chunk, before, received, **step)

    def result(self) -> Array:
        """Returns the array in its original shape, and completes the recorder's part."""
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
    """Returns a value for JSON: complex and non-finite numbers become text."""
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, complex):
        return str(value)
    return float(value) if math.isfinite(value) else str(value)


def collect(recorder: Recorder, link: Link) -> AllreduceRun | None:
    """Returns the steps of all ranks on rank 0; None on the others.

    Collective: every rank of the link calls this, after the allreduce it recorded.
    """
    part = finished(recorder)
    if link.rank > 0:
        link.send(0, np.frombuffer(json.dumps(part.to_dict()).encode(), np.uint8))
        return None
    others = [link.receive(rank) for rank in range(1, link.size)]
    return AllreduceRun.merge(
        [part, *(RankSteps.from_dict(json.loads(other.tobytes())) for other in others)]
    )


def finished(recorder: Recorder) -> RankSteps:
    """Returns the part of a recorder whose allreduce has ended."""
    if recorder.part is None:
        raise CollectiveError(
            "a recorder needs a finished allreduce: it has recorded none. "
            "Pass it as recorder= to the allreduce first."
        )
    return recorder.part
