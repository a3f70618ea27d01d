"""Allreduce in readable code: ring, recursive doubling and tree, and a record of their steps.

Each is one function that only sends to and receives from other ranks. They use only numpy.
`MpiLink` runs them over MPI, `LoopbackLinks` in one process.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from allranks.errors import CollectiveError
from allranks.lessons.links import Array, Link, LoopbackLinks, MpiLink
from allranks.lessons.records import AllreduceRun, RankSteps, Scalar, Step, Values

__all__ = [
    "ALGORITHMS",
    "AllreduceRun",
    "Link",
    "LoopbackLinks",
    "MpiLink",
    "RankSteps",
    "Recorder",
    "Step",
    "Values",
    "collect",
    "explain",
    "recursive_doubling_allreduce",
    "ring_allreduce",
    "tree_allreduce",
]

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
        # Case does not matter.
        ...


Op = str | NamedOp


def op_name(op: Op) -> str:
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

    The lengths of the chunks differ by at most one, and may be 0.
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
        return self.flat[self.edges[chunk] : self.edges[chunk + 1]]

    def combine(self, chunk: int, received: Array, **step: Any) -> None:
        with self._recorded(chunk, received, **step):
            OPS[self.op](self[chunk], received, out=self[chunk])

    def replace(self, chunk: int, received: Array, **step: Any) -> None:
        with self._recorded(chunk, received, **step):
            self[chunk][:] = received

    def result(self) -> Array:
        # Also completes the recorder's part.
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

    @contextmanager
    def _recorded(
        self, chunk: int, received: Array, *, number: int, phase: str, sender: int
    ) -> Iterator[None]:
        if self.recorder is None:
            yield
            return
        values = self.recorder.values
        before = values(self[chunk])
        yield
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
                received=values(received),
                after=values(self[chunk]),
            )
        )


def plain(value: Any) -> Scalar:
    # JSON has no complex and no non-finite numbers, so these become text.
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
        link.send(0, np.frombuffer(pickle.dumps(part), np.uint8))
        return None
    others = [pickle.loads(link.receive(rank).tobytes()) for rank in range(1, link.size)]
    return AllreduceRun.merge([part, *others])


def finished(recorder: Recorder) -> RankSteps:
    if recorder.part is None:
        raise CollectiveError(
            "a recorder needs a finished allreduce: it has recorded none. "
            "Pass it as recorder= to the allreduce first."
        )
    return recorder.part


def ring_allreduce(
    array: Array, link: Link, op: Op = "sum", recorder: Recorder | None = None
) -> Array:
    """Returns the reduction of all ranks' arrays.

    The array is cut into as many chunks as there are ranks. First each chunk travels once
    around the ring and collects every rank's share (reduce-scatter): after ``size - 1`` steps
    each rank owns one chunk that is complete. Then the complete chunks travel around once more
    and replace the incomplete ones (allgather). A rank sends ``2 (size - 1) / size`` times the
    array, less than twice for any number of ranks: a ring is fast for large arrays. It waits for
    ``2 (size - 1)`` messages, one after the other: a ring is slow for small arrays.

    Args:
        array: any shape and numeric dtype, the same on every rank; it is not changed.
        link: this rank's link to the others.
        op: "sum", "min", "max" or "product", or an object with such a name.
        recorder: records each step; None records and copies nothing.

    Returns:
        A new array of the same shape and dtype, bit for bit the same on every rank: each
        chunk is completed on one rank and copied from there.

    Collective: every rank of the link calls this, in the same order.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel Distrib. Comput. 69 (2009).
    """
    rank, size = link.rank, link.size
    right, left = (rank + 1) % size, (rank - 1) % size
    pieces = Pieces(array, link, count=size, algorithm="ring", op=op, recorder=recorder)

    for step in range(size - 1):
        mine, theirs = (rank - step) % size, (rank - step - 1) % size
        received = link.exchange(right, pieces[mine], left)
        pieces.combine(theirs, received, number=step, phase="reduce-scatter", sender=left)

    for step in range(size - 1):
        mine, theirs = (rank + 1 - step) % size, (rank - step) % size
        received = link.exchange(right, pieces[mine], left)
        pieces.replace(theirs, received, number=size - 1 + step, phase="allgather", sender=left)

    return pieces.result()


def recursive_doubling_allreduce(
    array: Array, link: Link, op: Op = "sum", recorder: Recorder | None = None
) -> Array:
    """Returns the reduction of all ranks' arrays.

    In round k a rank swaps its whole array with the partner whose number differs in bit k, and
    both reduce: groups of 2, 4, 8 … ranks have the same values. That takes only ``log2(size)``
    rounds, but a rank sends its whole array in each.

    Sizes that are no power of two fold first: with ``core`` the largest power of two that
    fits, each rank from ``core`` up sends its array to the rank ``core`` below it, skips the
    doubling, and receives the result at the end: two rounds more.

    The arguments are those of ``ring_allreduce``.

    Returns:
        A new array of the same shape and dtype, the same on every rank: partners combine the
        same two operands, and these operations are commutative.

    Collective: every rank of the link calls this, in the same order.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), section 4.5.
    """
    rank, size = link.rank, link.size
    pieces = Pieces(array, link, count=1, algorithm="recursive doubling", op=op, recorder=recorder)
    rounds = size.bit_length() - 1
    core = 1 << rounds
    folded = 1 if core < size else 0

    if rank >= core:
        link.send(rank - core, pieces[0])
        result = link.receive(rank - core)
        pieces.replace(0, result, number=folded + rounds, phase="unfold", sender=rank - core)
        return pieces.result()

    extra = rank + core
    if extra < size:
        pieces.combine(0, link.receive(extra), number=0, phase="fold", sender=extra)

    for k in range(rounds):
        partner = rank ^ (1 << k)
        received = link.exchange(partner, pieces[0], partner)
        pieces.combine(0, received, number=folded + k, phase="double", sender=partner)

    if extra < size:
        link.send(extra, pieces[0])
    return pieces.result()


def tree_allreduce(
    array: Array, link: Link, op: Op = "sum", recorder: Recorder | None = None
) -> Array:
    """Returns the reduction of all ranks' arrays.

    Rank r has the children ``2r + 1`` and ``2r + 2`` and the parent ``(r - 1) // 2``. A rank
    receives its left child's array, then its right child's, and sends the reduction up. Rank 0
    then has the result, which goes down the same edges. The depth grows with ``log2(size)``. A
    rank handles one message at a time, so each level takes two rounds.

    The arguments are those of ``ring_allreduce``.

    Returns:
        A new array of the same shape and dtype, bit for bit the same on every rank: rank 0
        completes it, the others copy.

    Collective: every rank of the link calls this, in the same order.
    Source: Thakur, Rabenseifner and Gropp (2005), section 4.3, for trees in MPI; NCCL's tree
    is this idea, pipelined and doubled (Sanders, Speck and Träff, 2009).
    """
    rank, size = link.rank, link.size
    pieces = Pieces(array, link, count=1, algorithm="tree", op=op, recorder=recorder)
    parent = (rank - 1) // 2
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
    height, depth = levels_below_root(size - 1), levels_below_root(rank)

    for turn, child in enumerate(children):
        number = 2 * (height - depth - 1) + turn
        pieces.combine(0, link.receive(child), number=number, phase="reduce", sender=child)

    if rank > 0:
        link.send(parent, pieces[0])
        # A left child has an odd number and takes the first turn.
        turn = (rank + 1) % 2
        number = 2 * height + 2 * (depth - 1) + turn
        pieces.replace(0, link.receive(parent), number=number, phase="broadcast", sender=parent)

    for child in children:
        link.send(child, pieces[0])
    return pieces.result()


def levels_below_root(rank: int) -> int:
    return (rank + 1).bit_length() - 1


Algorithm = Callable[[Array, Link, Op, Recorder | None], Array]

ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring_allreduce,
    "recursive doubling": recursive_doubling_allreduce,
    "tree": tree_allreduce,
}


def find(algorithm: str) -> Algorithm:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"expected one of {', '.join(ALGORITHMS)}: found {algorithm!r}.")
    return ALGORITHMS[algorithm]


def explain(arrays: Sequence[Array], algorithm: str = "ring", op: Op = "sum") -> AllreduceRun:
    """Runs an allreduce over ``arrays``, one per rank, in this process, and returns its steps.

    Example:
        >>> run = explain([np.arange(3), np.arange(3)], "ring")
        >>> run.result.items
        (0, 2, 4)
    """

    def one_rank(link: Link) -> RankSteps:
        recorder = Recorder()
        find(algorithm)(arrays[link.rank], link, op, recorder)
        return finished(recorder)

    # All run the same algorithm: a message may be late on a slow machine, and never is missing.
    links = LoopbackLinks(len(arrays), timeout_seconds=None)
    return AllreduceRun.merge(links.run(one_rank))
