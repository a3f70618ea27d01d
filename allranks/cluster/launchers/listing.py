"""What can start ranks here, and why what cannot."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.cluster import launchers
from allranks.cluster.launchers.launcher import OnSeveralHosts
from allranks.cluster.launchers.local import is_open_mpi, mpiexec
from allranks.cluster.launchers.sites import sites, unreadable
from allranks.cluster.launchers.ssh import require_ssh
from allranks.errors import ClusterError, MissingDependency, UsageError

_ABOUT = {
    "local": "ranks on this machine",
    "ssh": "--on ssh:h1:2,h2:2  hosts that ssh reaches without a password",
    "slurm": "--on slurm --nodes 2 --ntasks-per-node 4 --time 1:00:00  and other options of sbatch",
    "pbs": "--on pbs --nodes 2 --ntasks-per-node 4 -l walltime=1:00:00  and others of qsub",
    "lsf": "--on lsf --nodes 2 --ntasks-per-node 4 -W 1:00  and others of bsub",
}


@dataclass(frozen=True)
class Listed:
    """A launcher or a named place, what it is for, and why it cannot be used here, if so."""

    name: str
    about: str
    why_not: str = ""


def listed() -> list[Listed]:
    """Returns every launcher, then every named place.

    Raises:
        UsageError: a file of named places cannot be read.
    """
    found = [Listed(name, about, _why_not(name)) for name, about in _ABOUT.items()]
    for site in sites().values():
        about = f"{site.about or site.on}  ({site.file})"
        found.append(Listed(site.name, about, _why_not(site.name)))
    return found


def _why_not(name: str) -> str:
    try:
        if name == "ssh":
            require_ssh()
        elif name == "local":
            mpiexec()
        elif isinstance(launchers.named(name), OnSeveralHosts):
            pass
        if name != "local" and not is_open_mpi():
            return f"several hosts need Open MPI, and {mpiexec()} is another MPI"
    except (MissingDependency, ClusterError, UsageError) as error:
        return str(error)
    return ""


def text() -> str:
    """Returns them as lines, the default marked."""
    lines = []
    default = launchers.default()
    for one in listed():
        mark = "→" if one.name == default else " "
        lines.append(f"{mark} {one.name:<10} {one.about}")
        if one.why_not:
            lines.append(f"             not available: {one.why_not}")
    lines += [f"  {path} was not read: permission denied" for path in unreadable()]
    return "\n".join(lines)
