"""The cells on the pages say what the pages show."""

import importlib.util

import pytest

from tests.notebook.pages import run
from tests.notebook.steady import steady

PAGES = [
    "cells.md",
    "output.md",
    "dashboard.md",
    "failures.md",
    "collectives.md",
    "mpi.md",
    "errors.md",
    "ensemble.md",
    "tensorflow.md",
    "horovod.md",
]
NEED_TENSORFLOW = ("tensorflow.md", "horovod.md")


@pytest.mark.parametrize("name", PAGES)
def test_the_cells_say_what_the_page_shows(name, kernel, repository):
    if name in NEED_TENSORFLOW and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow: pip install 'allranks[tensorflow]'")
    cells = 0
    for found, said in run((repository / "docs" / name).read_text(), kernel):
        cells += 1
        if found["shown"] is not None:
            assert (found["source"], steady(said)) == (found["source"], steady(found["shown"]))
    assert cells
