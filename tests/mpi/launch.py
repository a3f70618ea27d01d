"""Starts a Python file on n ranks with the MPI wheel of a Python environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # More ranks than cores, and none bound to one.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
}


def environment(**more: str) -> dict[str, str]:
    """The environment in which both MPI wheels run, as root and with more ranks than cores."""
    return {**os.environ, **OPEN_MPI, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}


def mpiexec(
    ranks: int, *arguments: str, python: str = sys.executable, timeout: float = 120, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``python *arguments`` on so many ranks; its output is in ``stdout``, errors included."""
    program = Path(python).parent / "mpiexec"
    return subprocess.run(
        [str(program), "-n", str(ranks), python, *arguments],
        env=environment(**more),
        cwd=ROOT,
        timeout=timeout,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
