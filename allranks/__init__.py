"""allranks: a notebook cell on every rank of an MPI cluster.

``%load_ext allranks`` in a notebook, then ``%%distributed`` on top of a cell.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from allranks.cluster.cell_run import CapturedOutput as CapturedOutput
    from allranks.cluster.cluster import Cluster as Cluster
    from allranks.features.horovod_alias.run import run as run

__all__ = ["CapturedOutput", "Cluster", "load_ipython_extension", "run", "unload_ipython_extension"]


def __getattr__(name: str) -> Any:
    # Imported at the first use, so that `import allranks` stays fast.
    if name in ("Cluster", "run"):
        from allranks.notebook import load_features

        load_features()
    if name == "Cluster":
        from allranks.cluster.cluster import Cluster

        return Cluster
    if name == "CapturedOutput":
        from allranks.cluster.cell_run import CapturedOutput

        return CapturedOutput
    if name == "widgets":
        return importlib.import_module("allranks.widgets")
    if name == "run":
        from allranks.features.horovod_alias.run import run

        return run
    raise AttributeError(f"module 'allranks' has no attribute {name!r}")


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Adds ``%%distributed``, ``%distributed`` and ``%%ensemble`` to IPython."""
    from allranks.magics.extension import load
    from allranks.notebook import load_features

    load_features()
    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Removes the magics and ends the ranks."""
    from allranks.magics.extension import unload

    unload(shell)
