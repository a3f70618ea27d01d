"""Gives Lightning the one GPU that each rank sees.

Lightning's environment for MPI takes a rank's place on its host for the number of its GPU. A rank
with a GPU sees only that one, as number 0, and has `LOCAL_RANK` 0, as if it had its own host.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

MODULES = (
    "lightning.fabric.plugins.environments.mpi",
    "lightning_fabric.plugins.environments.mpi",
)


def install(module: ModuleType) -> None:
    """Changes one of ``MODULES``; only for ranks with a GPU."""
    environment: Any = module.MPIEnvironment
    environment.local_rank = lambda self: int(os.environ.get("LOCAL_RANK", "0"))
