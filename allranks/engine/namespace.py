"""The names every rank finds in its cells."""

from __future__ import annotations

from typing import Any

from allranks import collectives
from allranks.engine import metrics

#: What the engine needs of the collectives, and what stands for itself in a cell as a number.
_NOT_FOR_CELLS = {
    "Handle",
    "activity",
    "comm",
    "cross_rank",
    "cross_size",
    "dirty",
    "epoch",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "on_notice",
    "on_record",
    "rank",
    "renew",
    "scope",
    "shutdown",
    "size",
}
#: Every operation, and what it takes, by its bare name.
OPERATIONS = tuple(sorted(set(collectives.__all__) - _NOT_FOR_CELLS))


def names(device: str) -> dict[str, Any]:
    """Returns what a fresh rank's cells see."""
    place = {
        "rank": collectives.rank(),
        "size": collectives.size(),
        "local_rank": collectives.local_rank(),
        "local_size": collectives.local_size(),
        "comm": collectives.comm(),
        "device": device,
        "log": metrics.log,
    }
    return place | {name: getattr(collectives, name) for name in OPERATIONS}


def renew(namespace: dict[str, Any], old: object) -> None:
    """Points ``comm`` at the new epoch's communicator, unless the cell gave the name away."""
    if namespace.get("comm") is old:
        namespace["comm"] = collectives.comm()
