"""A notebook with ranks, and each lab, run once for all tests that look at it."""

import os
import sys
from functools import cache

import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests import labs
from tests.kernel import Kernel, spec_of
from tests.labs import NEED_TORCH
from tests.ports import free_port
from tests.torch.conftest import MISSING, python_with_torch


@pytest.fixture(scope="session")
def notebook(tmp_path_factory):
    """A kernel with two ranks, for all files that do not start their own."""
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        kernel.run("%load_ext allranks\n%distributed start -n 2")
        yield kernel


def python_for(name: str) -> str:
    if name not in NEED_TORCH:
        return sys.executable
    return python_with_torch() or pytest.skip(MISSING)


@pytest.fixture(scope="session")
def run_lab(tmp_path_factory):
    """Returns a lab after a run of all of its cells, without a browser."""

    def run(name: str, notebook: NotebookNode) -> NotebookNode:
        state = str(tmp_path_factory.mktemp("state"))
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            # What fails is found in the outputs, whole and with the cells after it.
            allow_errors=True,
            resources={"metadata": {"path": labs.path_of(name).parent}},
        )
        # The spec that is found by name may belong to another environment.
        manager = client.create_kernel_manager()
        manager._kernel_spec = spec_of(python_for(name))
        # The manager's own choice may be taken by another program until the kernel listens.
        manager.cache_ports = False
        for channel in ("shell", "iopub", "stdin", "hb", "control"):
            setattr(manager, f"{channel}_port", free_port())
        client.execute(env=os.environ | {"XDG_STATE_HOME": state, "IPYTHONDIR": state})
        return notebook

    return run


@pytest.fixture(scope="session")
def executed(run_lab):
    """Returns a lab after a run of all of its cells, with the exercises solved at its end.

    Each runs once, without a browser, whichever suites came before.
    """
    return cache(lambda name: run_lab(name, labs.solved(name)))
