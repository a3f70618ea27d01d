"""The cells on the pages say what the pages show."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from allranks.engine.namespace import OPERATIONS, PLACE
from tests.mpi import launch
from tests.notebook.pages import CELL, run
from tests.notebook.steady import steady
from tests.torch.conftest import MISSING, python_with_torch

PAGES = [
    "../README.md",
    pytest.param("tutorial.md", marks=pytest.mark.replaces),
    "install.md",
    "cells.md",
    "output.md",
    "dashboard.md",
    "slow.md",
    pytest.param("failures.md", marks=pytest.mark.replaces),
    "attach.md",
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
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def fresh(own_kernel, tmp_path):
    """One kernel for all pages that need no Python of their own."""
    own_kernel.run("%unload_ext allranks")
    own_kernel.run(f"import os; os.chdir({str(tmp_path)!r})\n%reset -f")
    return own_kernel


@pytest.fixture
def temporary():
    """A temporary folder with a short path, in which there are no other clusters."""
    with tempfile.TemporaryDirectory(prefix="pages-") as folder:
        yield folder


@pytest.mark.parametrize("name", PAGES)
def test_the_cells_say_what_the_page_shows(name, fresh, new_kernel, repository, temporary):
    kernel = fresh
    if name == "attach.md":
        kernel = new_kernel({"TMPDIR": temporary})
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


PAGE = (DOCS / "collectives.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
TYPES = {"Compression", "ProcessSet", "ReduceOp"}
CHOICES = """
    Average Sum Min Max Product Adasum prescale_factor postscale_factor Compression.fp16
"""
NOTHING_TO_RUN = {"init", "shutdown"}
"""They do nothing in a cell; the page says so."""


HERE = r"<!-- run by tests/notebook/test_pages.py -->\n```python\n(.*?)```"


def test_the_commands_of_the_page_on_batch_run(tmp_path):
    page = (DOCS / "batch.md").read_text()
    (script,) = re.findall(HERE, page, re.DOTALL)
    # The script's cells are the notebook's, without what the export adds to them.
    sources = ["%load_ext allranks"]
    added = r"^# (?=%%)|^(allranks.batch.cell|if allranks.batch.rank).*\n|^    "
    for cell in re.split(r"# %% cell \d+\n", script)[1:]:
        sources.append(re.sub(added, "", cell, flags=re.MULTILINE).strip())
    made = [{"cell_type": "code", "source": source, "metadata": {}} for source in sources]
    (tmp_path / "train.ipynb").write_text(json.dumps({"nbformat": 4, "cells": made}))
    for name in ("sbatch", "kubectl"):  # neither is here
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    said = []
    for commands in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        done = subprocess.run(
            ["bash", "-e"],
            input=commands,
            cwd=tmp_path,
            env=launch.environment(PATH=path),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout
        said.append(done.stdout)
    batch, slurm, kubernetes, here = said
    assert "mean [0.75]" in batch
    assert "sbatch train.sbatch" in slurm
    assert "kubectl apply -f train.yaml" in kubernetes
    assert "rank 0 │ mean [0.75]" in here
    assert (tmp_path / "train.py").read_text().endswith(script)


def test_the_lines_at_the_top_of_a_script_run():
    (script,) = re.findall(HERE, PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
