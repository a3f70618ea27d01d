"""Which of torch's process groups shall be those of allranks: a variable of the environment."""

from __future__ import annotations

import os

#: The environment variable: ``gloo`` for torch's own groups, ``allranks`` for those of allranks on
#: GPUs too. With ``nccl``, or unset, groups with a backend for GPUs are torch's own.
SETTING = "ALLRANKS_TORCH"


def is_wanted() -> bool:
    """Whether groups of tensors in host memory shall be made by allranks."""
    return os.environ.get(SETTING, "") != "gloo"


def takes_gpu() -> bool:
    """Whether these groups shall take tensors on a GPU too."""
    return os.environ.get(SETTING, "") == "allranks"
