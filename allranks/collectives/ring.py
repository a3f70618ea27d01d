"""Allreduce written to be read: ring, recursive doubling and tree, and the steps they took."""

from allranks.collectives.algorithms.doubling import recursive_doubling_allreduce
from allranks.collectives.algorithms.link import Link
from allranks.collectives.algorithms.loopback import LoopbackLinks
from allranks.collectives.algorithms.mpi_link import MpiLink
from allranks.collectives.algorithms.pieces import Recorder
from allranks.collectives.algorithms.ring import ring_allreduce
from allranks.collectives.algorithms.story import ALGORITHMS, collect, explain
from allranks.collectives.algorithms.tree import tree_allreduce
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
