"""Open MPI's mpiexec.

As rank 1 of 4 has it: OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1
OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=1
"""

from allranks.launched.variables import Variables

OPEN_MPI = Variables(
    ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
SHARED_FILES = "OMPI_MCA_btl_sm_backing_directory"
"""The setting of where ranks of a host share memory, in a file each; /dev/shm without it."""
