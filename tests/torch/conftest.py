"""The environment that has torch and JAX, which the project's own has not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.faults.notebook import Notebook

SETTING = "ALLRANKS_TEST_TORCH"
MISSING = (
    "needs torch: pip finds no build for CPUs, and another needs 14 GB of free space. Type: "
    "PIP_EXTRA_INDEX_URL=… make test, with the address for CPU builds on torch's install page. "
    f"Or, with a Python that has torch: {SETTING}=/path/to/that/python make test"
)
# The tests compare whole texts: no notice that a rank of a busy machine is late.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "ALLRANKS_LATE_SECONDS": "600"}


LEAST_SECONDS = "allranks.features.verdict.notebook._LEAST_SECONDS"
#: What all three ranks have printed before they wait for each other.
ALL_HERE = "ranks 0–2 │ here"


@cache
def python_with_torch() -> str:
    """Returns the Python that has torch; an empty text where there is none."""
    python = os.environ.get(SETTING, "")
    if not python or not Path(python).exists():
        return ""
    program = "import importlib.util as u; raise SystemExit(u.find_spec('torch') is None)"
    return "" if subprocess.run([python, "-c", program], check=False).returncode else python


@pytest.fixture(scope="session")
def python() -> str:
    """A Python that has torch."""
    return python_with_torch() or pytest.skip(MISSING)


def notebook(folder: Path, python: str, torch: str, says: str, **more: str) -> Iterator[Notebook]:
    """A notebook with three ranks, for the value ``torch`` of ``--torch``; at the end nothing is
    left.

    What DistributedDataParallel imports when it is first used takes longer than all else.
    """
    with Notebook(folder, ENVIRONMENT | more, python) as shared:
        option = f" --torch {torch}" if torch else ""
        line = f"%distributed start -n 3{option} --preload torch,torch._dynamo"
        started = shared.run(line, 300)
        assert started.status == "ok", started.text
        assert says in started.text
        # Nor why a cell was slow, which is said of those that last so many seconds.
        module, _, name = LEAST_SECONDS.rpartition(".")
        shared.run(f"import {module} as _module\n_module.{name} = 1e9").ok()
        yield shared
        shared.shutdown()
        shared.wait_for_no_children()


@pytest.fixture(scope="session")
def ranks(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook with three ranks that have torch, for all tests."""
    folder = tmp_path_factory.mktemp("notebook")
    yield from notebook(folder, python, "", "torch.distributed runs on allranks")


@pytest.fixture(scope="session")
def gloo_ranks(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """The same, whose torch has its own process groups."""
    says = "torch.distributed uses its own process groups (gloo)"
    yield from notebook(tmp_path_factory.mktemp("gloo"), python, "gloo", says)
