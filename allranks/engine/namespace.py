"""The names every rank finds in its cells."""

from __future__ import annotations

from typing import Any

from allranks import collectives

#: Collectives that cells call by their bare name.
OPERATIONS = (
    "allreduce",
    "allgather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "reducescatter",
    "alltoall",
    "barrier",
    "send",
    "recv",
    "broadcast_object",
    "allgather_object",
    "Average",
    "Sum",
    "Min",
    "Max",
    "Product",
)


def names(device: str) -> dict[str, Any]:
    """Returns what a fresh rank's cells see."""
    place = {
        "rank": collectives.rank(),
        "size": collectives.size(),
        "local_rank": collectives.local_rank(),
        "local_size": collectives.local_size(),
        "comm": collectives.comm(),
        "device": device,
    }
    return place | {n: getattr(collectives, n) for n in OPERATIONS if hasattr(collectives, n)}


def renew(namespace: dict[str, Any], old: object) -> None:
    """Points ``comm`` at the new epoch's communicator, unless the cell gave the name away."""
    if namespace.get("comm") is old:
        namespace["comm"] = collectives.comm()
