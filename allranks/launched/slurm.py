"""Slurm's srun.

As task 1 of 4 has it: SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1
SLURM_NTASKS_PER_NODE=4
"""

from allranks.launched.variables import Variables

SLURM = Variables(
    ("SLURM_PROCID",), "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"
)
