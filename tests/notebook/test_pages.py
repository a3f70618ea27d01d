"""The cells on the pages say what the pages show."""

import importlib.util
import sys

import pytest

from tests.notebook.pages import run
from tests.notebook.steady import steady
from tests.torch.conftest import MISSING, python_with_torch

PAGES = [
    "../README.md",
    "cells.md",
    "output.md",
    "dashboard.md",
    "slow.md",
    "failures.md",
    "collectives.md",
    "mpi.md",
    "errors.md",
    "ensemble.md",
    "tensorflow.md",
    "horovod.md",
    "torch_jax.md",
]
NEED_TORCH = ("torch_jax.md",)
NEED_TENSORFLOW = ("tensorflow.md", "horovod.md")


@pytest.mark.parametrize("name", PAGES)
def test_the_cells_say_what_the_page_shows(name, new_kernel, repository):
    if name in NEED_TENSORFLOW and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow: pip install 'allranks[tensorflow]'")
    python = python_with_torch() if name in NEED_TORCH else sys.executable
    kernel = new_kernel(python=python) if python else pytest.skip(MISSING)
    cells = 0
    for found, said in run((repository / "docs" / name).read_text(), kernel):
        cells += 1
        if found["shown"] is not None:
            assert (found["source"], steady(said)) == (found["source"], steady(found["shown"]))
    assert cells
