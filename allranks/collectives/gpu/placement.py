"""Where a call's arrays move, and which transport a group of ranks on GPUs can use.

NCCL identifies GPUs by where they are plugged in, so the slices of one GPU (MIG) are one to it, and
it refuses a communicator with two ranks on one. Where every rank has NCCL 2.30 or newer and
NCCL_MULTI_RANK_GPU_ENABLE=1, it does not; that is experimental, so only a call that asks for NCCL
uses it.

Source: NCCL 2.30, src/init.cc, initTransportsRank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from allranks.errors import UsageError
from allranks.records.ranks import label

ALLREDUCE = "ALLRANKS_ALLREDUCE"
"""nccl, staged or mpi: the transport of GPU arrays in allreduce, without an argument for it."""
ON_GPU = ("nccl", "staged")
_DEVICE = re.compile(r"/?(?:device:)?(cpu|gpu)(?::\d+)?", re.IGNORECASE)


class Placement(NamedTuple):
    """In which memory arrays move, and by which transport."""

    memory: str = ""
    """"cpu", "gpu", or "" for where each array is."""
    transport: str = ""
    """The transport's name, or "" for the fastest."""


def read(kind: str, transport: str | None, device: str) -> Placement:
    """The placement that a call's ``transport`` and ``device`` ask for; `UsageError` if they
    contradict each other.
    """
    memory = ""
    if device:
        found = _DEVICE.fullmatch(device)
        if found is None:
            raise UsageError(
                f"{kind} needs a device as '/cpu:0' or '/gpu:0', or '' for where the array is: "
                f"found {device!r}. Leave device= out."
            )
        memory = found[1].lower()
    if transport in ON_GPU and memory == "cpu":
        raise UsageError(
            f"{kind} needs one place for its arrays: found transport={transport!r}, which moves "
            f"arrays on a GPU, and device={device!r}. Leave one of them out."
        )
    if transport is not None and transport not in ON_GPU:
        # All other transports move data between host memories.
        return Placement("cpu", transport)
    return Placement(memory, transport or "")


def of_environment(kind: str) -> Placement:
    """The placement that the environment asks for, for an operation on GPU arrays."""
    value = os.environ.get(ALLREDUCE, "").strip().lower()
    if not value or kind not in ("allreduce", "grouped_allreduce"):
        return Placement()
    if value == "mpi":
        return Placement("cpu", "mpi")
    if value in ON_GPU:
        return Placement("gpu", value)
    raise UsageError(
        f"{ALLREDUCE} needs nccl, staged or mpi: found {value!r}. Unset it for the fastest."
    )


class RankDevice(NamedTuple):
    """One rank's GPU."""

    host: int
    bus: str
    uuid: str
    nccl: int
    """NCCL's version, as 22703; 0 without it."""
    why: str = ""
    """Why NCCL is missing."""
    shares: bool = False
    """Whether NCCL may put several ranks on one GPU: set by the user, and supported."""

    def pack(self) -> bytes:
        return "\0".join(map(str, (*self[:-1], int(self.shares)))).encode()

    @classmethod
    def unpack(cls, data: bytes) -> RankDevice:
        host, bus, uuid, nccl, why, shares = data.decode().split("\0", 5)
        return cls(int(host), bus, uuid, int(nccl), why, shares == "1")


MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARES_FROM = 23000


def obstacle(ranks: Sequence[int], devices: Sequence[RankDevice], *, sharing: bool = False) -> str:
    """Why NCCL cannot serve a group, as a clause; "" if it can. ``sharing``: NCCL may have several
    ranks on one GPU.
    """
    found: dict[tuple[int, str], tuple[RankDevice, list[int]]] = {}
    for rank, device in zip(ranks, devices, strict=True):
        found.setdefault((device.host, device.bus), (device, []))[1].append(rank)
    for device, sharers in found.values():
        if len(sharers) == 1 or sharing:
            continue
        slices = {s.uuid for r, s in zip(ranks, devices, strict=True) if r in sharers}
        what = "slices of one GPU" if len(slices) == len(sharers) else "one GPU"
        return f"{label(sharers)} share {what} ({device.uuid or device.bus})"
    without = [rank for rank, device in zip(ranks, devices, strict=True) if not device.nccl]
    if without:
        why = next(device.why for device in devices if not device.nccl)
        return f"{label(without)} {'has' if len(without) == 1 else 'have'} none ({why})"
    # Releases of one major version speak to each other only if they are the same.
    versions = {device.nccl for device in devices}
    if len(versions) > 1:
        return f"its versions differ: {', '.join(map(str, sorted(versions)))}"
    return ""


def choose(wanted: str, ranks: Sequence[int], devices: Sequence[RankDevice]) -> str:
    """The transport of a group: the same on every member, or the same `UsageError`."""
    asked = wanted == "nccl" and all(device.shares for device in devices)
    against = obstacle(ranks, devices, sharing=asked)
    if wanted == "nccl" and against:
        raise UsageError(
            f"transport='nccl' needs NCCL and a GPU for each rank: {against}. Leave transport= "
            "and ALLRANKS_ALLREDUCE out: the arrays are then staged through the host. With "
            f"{MULTI_RANK}=1 on every rank, ranks share a GPU in NCCL 2.30 and newer, which is "
            "experimental there."
        )
    return wanted or ("staged" if against else "nccl")
