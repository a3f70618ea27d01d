"""Ranks that run scripts: with TensorFlow loaded, and with digits for MNIST and CIFAR-10."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kernel import Cell, Kernel

SCRIPTS = Path(__file__).with_name("scripts")
ROOT = Path(__file__).parents[2]


def source(name: str) -> str:
    """The text of a script."""
    return (SCRIPTS / f"{name}.py").read_text()


class Ranks:
    """A notebook whose ranks have TensorFlow and the digits.

    Args:
        kernel: the notebook's.
        size: how many ranks.
    """

    def __init__(self, kernel: Kernel, size: int) -> None:
        self.kernel = kernel
        loaded = kernel.run("%load_ext allranks")
        assert loaded.status == "ok", loaded.text
        begin = (
            f"import sys\nprint('tensorflow' in sys.modules)\nsys.path.insert(0, {str(ROOT)!r})\n"
        )
        begin += "from tests.seeds import digits\ndigits.use()\ndel sys.path[0]"
        self.start = kernel.run(f"%%distributed -n {size} --preload tensorflow\n{begin}", 120)
        assert self.start.status == "ok", self.start.text

    def run(self, name: str) -> Cell:
        """Runs a script in a cell, as it is; what several ranks say alike is there from each."""
        return self.cell(source(name), "--no-fold")

    def cell(self, text: str, options: str = "") -> Cell:
        """Runs a cell on all ranks."""
        return self.kernel.run(f"%%distributed {options}\n{text}", 200)


def said(cell: Cell, pattern: str) -> list[str]:
    """What the ranks said where a pattern has a group, in the order of the ranks' labels."""
    assert cell.status == "ok", cell.text
    return re.findall(pattern, cell.text)


def need_packages() -> None:
    """Skips a test where a package is missing that its script needs; imports none of them."""
    for package, extra in (("tensorflow", "tensorflow"), ("sklearn", "lab")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}: pip install 'allranks[{extra}]'")


@pytest.fixture(scope="module")
def new_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ranks]]:
    """Starts one set of ranks after the other, ``new_ranks(2, ALLRANKS_TENSORFLOW="1")``."""
    need_packages()
    opened: list[Kernel] = []

    def start(size: int, **env: str | None) -> Ranks:
        kernel = Kernel(tmp_path_factory.mktemp("seeds"), env)
        opened.append(kernel.__enter__())
        return Ranks(kernel, size)

    yield start
    for kernel in opened:
        kernel.shutdown()
        kernel.wait_for_no_children()
        kernel.stop()
