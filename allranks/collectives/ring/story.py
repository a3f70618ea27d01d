"""From recorded steps to one ordered story: in this process, or over the ranks' own link."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from allranks.collectives.ring.doubling import recursive_doubling_allreduce
from allranks.collectives.ring.link import Array, Link
from allranks.collectives.ring.pieces import Op, Recorder
from allranks.collectives.ring.ring import ring_allreduce
from allranks.collectives.ring.threads import LoopbackLinks
from allranks.collectives.ring.tree import tree_allreduce
from allranks.errors import CollectiveError
from allranks.records.steps import RankSteps, Run

Algorithm = Callable[[Array, Link, Op, Recorder | None], Array]

ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring_allreduce,
    "recursive doubling": recursive_doubling_allreduce,
    "tree": tree_allreduce,
}


def explain(arrays: Sequence[Array], algorithm: str = "ring", op: Op = "sum") -> Run:
    """The story of an allreduce over ``arrays``, one per rank, played in this process.

    Example:
        >>> run = explain([np.arange(3), np.arange(3)], "ring")
        >>> run.result.items
        (0, 2, 4)
    """

    def one_rank(link: Link) -> RankSteps:
        recorder = Recorder()
        find(algorithm)(arrays[link.rank], link, op, recorder)
        return finished(recorder)

    return Run.merge(LoopbackLinks(len(arrays)).run(one_rank))


def collect(recorder: Recorder, link: Link) -> Run | None:
    """The story on rank 0; None on the others.

    Collective: every rank of the link calls this, after the allreduce it recorded.
    """
    part = finished(recorder)
    if link.rank > 0:
        link.send(0, np.frombuffer(json.dumps(part.to_dict()).encode(), np.uint8))
        return None
    others = [link.receive(rank) for rank in range(1, link.size)]
    return Run.merge(
        [part, *(RankSteps.from_dict(json.loads(other.tobytes())) for other in others)]
    )


def find(algorithm: str) -> Algorithm:
    """The allreduce of that name."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"expected one of {', '.join(ALGORITHMS)}: found {algorithm!r}.")
    return ALGORITHMS[algorithm]


def finished(recorder: Recorder) -> RankSteps:
    """The part that ``recorder`` holds once its allreduce has ended."""
    if recorder.part is None:
        raise CollectiveError(
            "a recorder needs a finished allreduce: it has recorded none. "
            "Pass it as recorder= to the allreduce first."
        )
    return recorder.part
