"""MPICH's mpiexec, Hydra.

As rank 1 of 4 has it: PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4
"""

from allranks.launched.variables import Variables

MPICH = Variables(("PMI_RANK",), "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
