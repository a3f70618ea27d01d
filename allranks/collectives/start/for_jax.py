"""Has ``jax.distributed.initialize()`` find the ranks, whichever MPI has started them.

JAX asks the launchers that it knows. Open MPI 5 and MPICH are not among them, and inside a job of
Slurm it would take the job's one task for the whole world. What it has for others is a class to
derive from, and that is derived as soon as somebody has imported JAX.
"""

from __future__ import annotations

import os
from typing import Any

from allranks.imported import AfterImport

ADDRESS, BIND = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's own: where the ranks meet, and where the first one listens."""
RANK, SIZE = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"


def _register(clusters: Any) -> None:
    """Makes the ranks the first of the clusters that JAX asks for."""
    base = clusters.ClusterEnv
    if any(known.name == "allranks" for known in base._cluster_types):
        return

    class Ranks(base):  # type: ignore[misc, valid-type]
        """What the environment says of this rank."""

        name = "allranks"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(name in os.environ for name in (ADDRESS, RANK, SIZE))

        @classmethod
        def get_coordinator_address(cls, *_: Any, **__: Any) -> str:
            return os.environ[ADDRESS]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ[SIZE])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ[RANK])

    # Deriving has put it last, and JAX takes the first that fits.
    base._cluster_types.remove(Ranks)
    base._cluster_types.insert(0, Ranks)


install = AfterImport(["jax._src.clusters"], _register).install
"""JAX is told when it is imported, or now where that has happened."""
