"""How a process finds its rank in the variables that its launcher has set, and what it removes
where none has started it.

Both sides use it; standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class RankVariables(NamedTuple):
    """The names of the variables that a launcher sets in each of its processes."""

    #: The first one that is set counts.
    ranks: tuple[str, ...]
    size: str
    local_rank: str
    local_size: str


#: OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1
#: OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=1
_OPEN_MPI = RankVariables(
    ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
#: MPICH's mpiexec is Hydra: PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4
_MPICH = RankVariables(("PMI_RANK",), "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
#: srun: SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 SLURM_NTASKS_PER_NODE=4
_SLURM = RankVariables(
    ("SLURM_PROCID",), "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"
)
# An mpiexec comes before srun, which may have started it.
_KNOWN = (_OPEN_MPI, _MPICH, _SLURM)

#: Open MPI's setting of the folder for the files through which ranks of a host share memory. Its
#: default is /dev/shm.
SHARED_FILES = "OMPI_MCA_btl_sm_backing_directory"
#: The same for windows.
WINDOW_FILES = "OMPI_MCA_osc_sm_backing_directory", "OMPI_MCA_osc_rdma_backing_directory"
#: The first one in Open MPI 4.
SHARED_FILES_OF_4 = "OMPI_MCA_btl_vader_backing_directory"

in_cells_of_ranks = False
"""Whether this process is a rank of a notebook, in which its cells run."""


def rank(environment: Mapping[str, str], own: Sequence[RankVariables] = ()) -> int:
    """Returns the rank that a launcher gave this process; 0 where none has started it.

    ``own`` is what its launcher sets, if that is neither mpiexec nor srun.
    """
    for variables in (*own, *_KNOWN):
        for name in variables.ranks:
            if environment.get(name, "").isdecimal():
                return int(environment[name])
    return 0


def size(environment: Mapping[str, str]) -> tuple[int, str]:
    """Returns the number of processes that were started, and the variable with it; 1 and "" if
    none.
    """
    for variables in _KNOWN:
        if environment.get(variables.size, "").isdecimal():
            return int(environment[variables.size]), variables.size
    return 1, ""


def local_place(
    environment: Mapping[str, str], rank: int, size: int, own: Sequence[RankVariables] = ()
) -> tuple[int, int]:
    """Returns a process's number among those of its host, and the number of these."""
    for variables in (*own, *_KNOWN):
        local, count = variables.local_rank, variables.local_size
        if environment.get(local, "").isdecimal() and environment.get(count, "").isdecimal():
            # Only with several hosts: Open MPI numbers local ranks in another order where there are
            # more of them than cores, and on a single host the rank is that number.
            if int(environment[count]) < size:
                return int(environment[local]), int(environment[count])
            break
    return rank, size


#: The names of the files that ranks of a host share begin so. Only Open MPI's mpiexec removes its
#: files: a process that it has not started leaves its own.
OPEN_MPI = "sm_segment."
#: MPICH opens its file by name only in MPI_Init. A rank that is killed later leaves it.
MPICH = "mpich_shm_"


def remove_segments(kind: str) -> None:
    """Removes the names of MPI's files that this process has mapped; MPI goes on with the files."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for path in set(re.findall(rf"(/\S*/{re.escape(kind)}\S+)$", maps, re.MULTILINE)):
        Path(path).unlink(missing_ok=True)
