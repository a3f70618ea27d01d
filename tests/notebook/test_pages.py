"""The cells on the pages say what the pages show."""

import importlib.util
import re
from pathlib import Path

import pytest

from allranks.engine.namespace import OPERATIONS, PLACE
from tests.notebook.pages import CELL, run
from tests.notebook.steady import steady
from tests.torch.conftest import MISSING, python_with_torch

PAGES = [
    "../README.md",
    "cells.md",
    "output.md",
    "dashboard.md",
    "slow.md",
    pytest.param("failures.md", marks=pytest.mark.replaces),
    "collectives.md",
    "mpi.md",
    "errors.md",
    "simulate.md",
    "algorithms.md",
    "model.md",
    "ensemble.md",
    "keras.md",
    "tensorflow.md",
    "horovod.md",
    pytest.param("torch_jax.md", marks=pytest.mark.replaces),
]
NEED_TORCH = ("keras.md", "torch_jax.md")
NEED_TENSORFLOW = ("tensorflow.md", "horovod.md")


@pytest.fixture
def fresh(own_kernel, tmp_path):
    """One kernel for all pages that need no Python of their own."""
    own_kernel.run("%unload_ext allranks")
    own_kernel.run(f"import os; os.chdir({str(tmp_path)!r})\n%reset -f")
    return own_kernel


@pytest.mark.parametrize("name", PAGES)
def test_the_cells_say_what_the_page_shows(name, fresh, new_kernel, repository):
    kernel = fresh
    if name in NEED_TENSORFLOW and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow: pip install 'allranks[tensorflow]'")
    if name in NEED_TORCH:
        kernel = new_kernel(python=python_with_torch() or pytest.skip(MISSING))
    cells = 0
    for found, said in run((repository / "docs" / name).read_text(), kernel):
        cells += 1
        if found["shown"] is not None:
            assert (found["source"], steady(said)) == (found["source"], steady(found["shown"]))
    assert cells


PAGE = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
TYPES = {"Compression", "ProcessSet", "ReduceOp"}
CHOICES = """
    Average Sum Min Max Product Adasum prescale_factor postscale_factor Compression.fp16
"""
NOTHING_TO_RUN = {"init", "shutdown"}
"""They do nothing in a cell; the page says so."""


def cells_of(section: str) -> str:
    sources = [found["source"] for found in CELL.finditer(section)]
    return "\n".join(source for source in sources if source.startswith("%%distributed"))


def has_picture(section: str) -> bool:
    return bool(re.search(r"^```\n", CELL.sub("", section), re.MULTILINE))


@pytest.mark.parametrize(
    "operation",
    sorted({*PLACE, *OPERATIONS} - TYPES - NOTHING_TO_RUN - {"keep"} - set(CHOICES.split())),
)
def test_an_operation_has_a_picture_and_a_cell_that_calls_it(operation):
    called = re.compile(rf"\b{operation}\b")
    sections = [section for section in SECTIONS if called.search(cells_of(section))]
    assert any(has_picture(section) for section in sections)


@pytest.mark.parametrize("word", [*CHOICES.split(), *sorted(NOTHING_TO_RUN)])
def test_what_an_operation_takes_is_told(word):
    assert re.search(rf"\b{re.escape(word)}\b", PAGE)
