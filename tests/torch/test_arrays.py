"""Our own operations take arrays of torch and JAX, and give back the same kind."""

from __future__ import annotations

from pathlib import Path

from tests.mpi.launch import mpiexec

RUN = str(Path(__file__).parents[1] / "mpi" / "run.py")


def test_every_operation_gives_back_the_kind_that_came_in(python):
    ended = mpiexec(2, RUN, "kinds", "-ktorch or jax", "-rs", python=python, timeout=250)
    assert ended.returncode == 0, ended.stdout
    assert "the package torch is missing" not in ended.stdout
    assert "the package jax is missing" not in ended.stdout
