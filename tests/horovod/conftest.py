"""Ranks for scripts, with TensorFlow loaded, and with digits in place of MNIST and CIFAR-10."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.kernel import Cell, Kernel

SCRIPTS = Path(__file__).with_name("scripts")
ROOT = Path(__file__).parents[2]
SHOW_DIGITS = (
    f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    "from tests.horovod import digits\ndigits.use()\ndel sys.path[0]\n"
)


def source(name: str) -> str:
    """Returns the text of a script."""
    return (SCRIPTS / f"{name}.py").read_text()


def on_ranks(kernel: Kernel, text: str, options: str = "") -> Cell:
    """Runs a cell on all ranks."""
    return kernel.run(f"%%distributed {options}\n{text}", 200)


def run_script(kernel: Kernel, name: str) -> Cell:
    """Runs a script unchanged in a cell, without folding of equal output."""
    return on_ranks(kernel, source(name), "--no-fold")


def said(cell: Cell, pattern: str) -> list[str]:
    """Returns the group of a pattern in the output of each rank, in the order of the labels."""
    assert cell.status == "ok", cell.text
    return re.findall(pattern, cell.text)


def need_packages() -> None:
    """Skips a test if a package of its script is missing, without importing it."""
    for package, extra in (("tensorflow", "tensorflow"), ("sklearn", "lab")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}: pip install 'allranks[{extra}]'")
