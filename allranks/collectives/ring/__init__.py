"""Allreduce written to be read: ring, recursive doubling and tree, and the steps they took."""

from allranks.collectives.ring.doubling import recursive_doubling_allreduce
from allranks.collectives.ring.link import Link
from allranks.collectives.ring.mpi_link import MpiLink
from allranks.collectives.ring.pieces import Recorder
from allranks.collectives.ring.ring import ring_allreduce
from allranks.collectives.ring.story import ALGORITHMS, collect, explain
from allranks.collectives.ring.threads import LoopbackLinks
from allranks.collectives.ring.tree import tree_allreduce
from allranks.records.steps import RankSteps, Run, Step, Values

__all__ = [
    "ALGORITHMS",
    "Link",
    "LoopbackLinks",
    "MpiLink",
    "RankSteps",
    "Recorder",
    "Run",
    "Step",
    "Values",
    "collect",
    "explain",
    "recursive_doubling_allreduce",
    "ring_allreduce",
    "tree_allreduce",
]
