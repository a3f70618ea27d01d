"""Allreduce in readable code: ring, recursive doubling and tree, and a record of their steps.

The algorithms use only numpy. `MpiLink` runs them over MPI, `LoopbackLinks` in one process.
"""

from allranks.lessons.records import AllreduceRun, RankSteps, Step, Values
from allranks.lessons.ring.algorithms import (
    ALGORITHMS,
    Recorder,
    collect,
    explain,
    recursive_doubling_allreduce,
    ring_allreduce,
    tree_allreduce,
)
from allranks.lessons.ring.links import Link, LoopbackLinks, MpiLink

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
