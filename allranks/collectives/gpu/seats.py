"""Who sits on which GPU, and what follows from it for a group of ranks.

NCCL refuses two ranks on one GPU, and tells GPUs apart by where they are plugged in: the slices of
one GPU (MIG) are one to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from allranks.errors import UsageError
from allranks.records.ranks import label


class Seat(NamedTuple):
    """One rank's GPU."""

    host: int
    bus: str
    uuid: str
    nccl: int
    """NCCL's version, as 22703; 0 without it."""
    why: str = ""
    """Why there is no NCCL."""

    def pack(self) -> bytes:
        """The seat as bytes."""
        return "\0".join(map(str, self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Seat:
        """The seat that `pack` was called on."""
        host, bus, uuid, nccl, why = data.decode().split("\0", 4)
        return cls(int(host), bus, uuid, int(nccl), why)


def obstacle(ranks: Sequence[int], seats: Sequence[Seat]) -> str:
    """Why NCCL cannot serve a group, as a clause; "" where it can."""
    found: dict[tuple[int, str], tuple[Seat, list[int]]] = {}
    for rank, seat in zip(ranks, seats, strict=True):
        found.setdefault((seat.host, seat.bus), (seat, []))[1].append(rank)
    for seat, sitting in found.values():
        if len(sitting) == 1:
            continue
        slices = {s.uuid for r, s in zip(ranks, seats, strict=True) if r in sitting}
        what = "slices of one GPU" if len(slices) == len(sitting) else "one GPU"
        return f"{label(sitting)} share {what} ({seat.uuid or seat.bus})"
    without = [rank for rank, seat in zip(ranks, seats, strict=True) if not seat.nccl]
    if without:
        why = next(seat.why for seat in seats if not seat.nccl)
        return f"{label(without)} {'has' if len(without) == 1 else 'have'} none ({why})"
    # Releases of one major version speak to each other only if they are the same.
    versions = {seat.nccl for seat in seats}
    if len(versions) > 1:
        return f"its versions differ: {', '.join(map(str, sorted(versions)))}"
    return ""


def choose(wanted: str, ranks: Sequence[int], seats: Sequence[Seat]) -> str:
    """The transport of a group: the same on every member, or the same `UsageError`."""
    against = obstacle(ranks, seats)
    if wanted == "nccl" and against:
        raise UsageError(
            f"transport='nccl' needs NCCL and a GPU for each rank: {against}. Leave transport= "
            "and ALLRANKS_ALLREDUCE out: the arrays are then staged through the host."
        )
    return wanted or ("staged" if against else "nccl")
