"""The names of a cell, for a script without a notebook: ``from allranks.batch import *``.

Runs in every rank, under ``mpiexec`` or ``allranks run``. The import starts MPI, pins the rank to a
GPU of its host, and makes ``import horovod`` find allranks, as the start of a notebook's rank does.
``allranks export`` writes scripts that begin with this line.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Any

from allranks import collectives, launched
from allranks.collectives import world
from allranks.collectives.start.under_mpi import guard_mpi4py
from allranks.engine import libraries, namespace
from allranks.horovod import alias


def _device() -> str:
    # Before anything can open CUDA.
    if collectives.is_initialized():
        # `allranks run` pins its ranks when it starts them.
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
        return libraries.device_text(gpu) if gpu and gpu != libraries.HIDDEN else "cpu"
    size, _ = launched.size(os.environ)
    local, local_size = launched.local_place(os.environ, launched.rank(os.environ), size)
    libraries.share_cores(local_size)
    device, settings = libraries.pinning(libraries.visible_gpus(), local, local_size)
    libraries.set_variables(os.environ, settings)
    return device


def _begin() -> dict[str, Any]:
    device = _device()
    if device == "cpu":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", libraries.QUIET)
    os.environ.setdefault("MPLBACKEND", "agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Without line buffering, ranks write into each other's lines, and long after the print.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    alias.install()
    alias.install_tensorflow()
    if not collectives.is_initialized():
        collectives.init()
        guard_mpi4py(world.current())
    return namespace.names(device)


def cell() -> None:
    """Begins a cell: returns when all ranks have ended the cell before.

    Collective over all ranks. Raises RankLeft if a rank has failed in the cell before.
    """
    sys.stdout.flush()
    collectives.barrier()


def show(value: object) -> None:
    """Prints the value of a cell's last expression, unless it is None."""
    if value is not None:
        _print(value)


def display(*values: object) -> None:
    """Prints the values that a notebook would display."""
    for value in values:
        _print(value)


def _print(value: object) -> None:
    sys.stdout.write(f"{value!r}\n")


_names = _begin()
globals().update(_names)
rank: int = _names["rank"]
__all__ = ["display", *_names]
