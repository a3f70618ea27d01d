"""The part in the kernel; `allranks.grading.nbgrader` calls it, around the cells of a student."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

from IPython.core.getipython import get_ipython

from allranks.features.grading import originals

GRADING = "ALLRANKS_GRADING"
"""Set in the kernel, and so in its ranks: keep the originals."""


def begin(file: str) -> None:
    """Keeps the originals of the kernel, before its first cell; then makes a file."""
    os.environ[GRADING] = "1"
    # Else they would be imported later, and not be kept.
    importlib.import_module("allranks.magics.extension")
    shell = get_ipython()
    assert shell is not None
    originals.keep(shell, {}, on_rank=False)
    Path(file).touch()


def prepare(file: str, test: bool) -> None:
    """Restores the originals, if a test comes next; writes the processes of the ranks to a file."""
    if test:
        assert originals.kept is not None
        originals.kept.restore("")
    cluster = importlib.import_module("allranks.cluster.cluster").running()
    hellos = {} if cluster is None else cluster.hellos
    Path(file).write_text(json.dumps([hello.pid for hello in hellos.values()]))
