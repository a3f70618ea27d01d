"""Runs in the notebook's kernel: what ``--on`` names, and what starts the ranks there.

`launcher` defines what a launcher is, `registry` lists them. `launcher` also has those for this
machine and for ssh, `slurm` and `pbs_lsf` those for batch systems,
`ray_dask` and `actors` those for Dask and Ray.
"""

from allranks.cluster.launchers.registry import default, named, takes_options

__all__ = ["default", "named", "takes_options"]
