"""The names that each rank finds in its cells."""

from __future__ import annotations

from typing import Any

from allranks import collectives
from allranks.engine import telemetry

#: Where a rank is: numbers in a cell, not functions.
PLACE = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
#: Names of the collectives that only the engine needs.
_NOT_FOR_CELLS = {
    "Handle",
    "activity",
    "dirty",
    "epoch",
    "on_notice",
    "on_record",
    "renew",
    "scope",
}
#: Each operation and its operands, by their bare names.
OPERATIONS = tuple(sorted(set(collectives.__all__) - _NOT_FOR_CELLS - set(PLACE)))


def names(device: str) -> dict[str, Any]:
    """Returns the names in the cells of a fresh rank, with their values."""
    own = {"device": device, "log": telemetry.log}
    return place() | own | {name: getattr(collectives, name) for name in OPERATIONS}


def place() -> dict[str, Any]:
    from mpi4py import MPI

    found: dict[str, Any] = {name: getattr(collectives, name)() for name in PLACE}
    return found | {"comm": collectives.comm, "MPI": MPI}
