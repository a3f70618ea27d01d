"""Runs in the notebook's kernel: what ``--on`` names, and what starts the ranks there.

`launcher` defines what a launcher is, `registry` lists them. The other modules hold one
launcher each, and what several of them share: `mpiexec`, `addresses` and `batch`.
"""

from allranks.cluster.launchers.registry import default, named, takes_options

__all__ = ["default", "named", "takes_options"]
