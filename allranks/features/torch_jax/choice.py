"""Which of torch's process groups shall be those of allranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

#: The environment variable: ``gloo`` for torch's own groups, ``allranks`` for those of allranks on
#: GPUs too, ``nccl`` for torch's NCCL on GPUs. Unset, groups with a backend for GPUs are torch's
#: own, unless ranks share a GPU, which NCCL refuses.
SETTING = "ALLRANKS_TORCH"
_shared = False
"""Whether ranks share a GPU, and all of them can move its arrays; the same on all ranks."""


def is_wanted() -> bool:
    """Whether groups of tensors in host memory shall be made by allranks."""
    return os.environ.get(SETTING, "") != "gloo"


def takes_gpu() -> bool:
    """Whether these groups shall take tensors on a GPU too."""
    chosen = os.environ.get(SETTING, "")
    return chosen == "allranks" or (not chosen and _shared)


def own_gpu() -> str:
    """The one GPU that this rank is shown; "" where it sees others, or may leave it to NCCL."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    by_nccl = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    one = shown.startswith("GPU-") and "," not in shown
    return shown if one and not by_nccl and find_spec("cupy") is not None else ""


def note_gpus(places: Sequence[tuple[int, str]]) -> None:
    """Notes whether ranks share a GPU, from the host and the `own_gpu` of every rank."""
    global _shared
    _shared = all(gpu for _, gpu in places) and len(set(places)) < len(places)
