"""Where a call's arrays move, as its arguments and the environment say."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from allranks.errors import UsageError

ALLREDUCE = "ALLRANKS_ALLREDUCE"
"""nccl, staged or mpi: how the allreduces of arrays on a GPU go where no argument says."""
ON_GPU = ("nccl", "staged")
_DEVICE = re.compile(r"/?(?:device:)?(cpu|gpu)(?::\d+)?", re.IGNORECASE)


class Wanted(NamedTuple):
    """Where arrays go, and by which transport; "" is where they are, and the fastest."""

    memory: str = ""
    """"cpu", "gpu", or "" for where each array is."""
    transport: str = ""


def read(kind: str, transport: str | None, device: str) -> Wanted:
    """What a call's ``transport`` and ``device`` come to.

    Raises:
        UsageError: they contradict each other, or are not known.
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
        # Asked for by name: the ways between the ranks' host memories.
        return Wanted("cpu", transport)
    return Wanted(memory, transport or "")


def of_environment(kind: str) -> Wanted:
    """What the environment says about an operation on arrays that are on a GPU."""
    said = os.environ.get(ALLREDUCE, "").strip().lower()
    if not said or kind not in ("allreduce", "grouped_allreduce"):
        return Wanted()
    if said == "mpi":
        return Wanted("cpu", "mpi")
    if said in ON_GPU:
        return Wanted("gpu", said)
    raise UsageError(
        f"{ALLREDUCE} needs nccl, staged or mpi: found {said!r}. Unset it for the fastest."
    )
