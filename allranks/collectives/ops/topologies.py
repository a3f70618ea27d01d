"""Communicators with a topology: a grid, a graph, and what neighbours exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allranks.collectives.ops.communicator import Comm, making
from allranks.collectives.ops.mpi_collectives import blocking
from allranks.errors import UsageError

_Raw = MPI.Topocomm


class Topocomm(Comm, MPI.Topocomm):
    """MPI.Topocomm, guarded."""

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Gathers the picklable objects of the neighbours that send to this rank."""
        return self._exchange("neighbor_allgather", [sendobj] * self.outdegree)

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Exchanges picklable objects with the neighbours, one for each."""
        values = list(sendobj)
        if len(values) != self.outdegree:
            raise UsageError(
                f"comm.neighbor_alltoall needs one object for each of this rank's {self.outdegree} "
                f"neighbours: found {len(values)}."
            )
        return self._exchange("neighbor_alltoall", values)

    def _exchange(self, op: str, values: list[Any]) -> list[Any]:
        """Sizes first, then the objects; None from where there is no neighbour."""
        parts = [MPI.pickle.dumps(value) for value in values]
        lengths = np.array([len(part) for part in parts], np.int64)
        theirs = np.zeros(self.indegree, np.int64)
        self._collective(op, _Raw.Ineighbor_alltoall, lengths, theirs)
        data = np.empty(int(theirs.sum()), np.uint8)
        sent = (np.frombuffer(b"".join(parts), np.uint8), lengths.tolist())
        self._collective(op, _Raw.Ineighbor_alltoallv, sent, (data, theirs.tolist()))
        pieces = np.split(data, np.cumsum(theirs)[:-1]) if theirs.size else []
        return [MPI.pickle.loads(piece.tobytes()) if piece.size else None for piece in pieces]


for _form in ("allgather", "allgatherv", "alltoall", "alltoallv", "alltoallw"):
    setattr(Topocomm, f"Neighbor_{_form}", blocking(_Raw, f"Neighbor_{_form}"))


class Cartcomm(Topocomm, MPI.Cartcomm):
    """MPI.Cartcomm, guarded."""


making(Cartcomm, MPI.Cartcomm, "Sub")


class Graphcomm(Topocomm, MPI.Graphcomm):
    """MPI.Graphcomm, guarded."""


class Distgraphcomm(Topocomm, MPI.Distgraphcomm):
    """MPI.Distgraphcomm, guarded."""


TOPOLOGIES = {MPI.CART: Cartcomm, MPI.GRAPH: Graphcomm, MPI.DIST_GRAPH: Distgraphcomm}
