"""What launchers have put into the environment of a rank."""

from __future__ import annotations

import os
import re

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
"""Horovod's levels of logging."""
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD"}
"""Names of variables that are no other process's."""
_SAID = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def is_exportable(v: str) -> bool:
    """Whether a variable of this name is meant for other processes too."""
    return not any(re.fullmatch(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """The rank and the number of ranks, as the launcher says; 0 of 1 where none does."""
    for rank, size in _SAID:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1
