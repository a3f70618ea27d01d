"""The labs, each run once for all tests that look at it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests import labs


@pytest.fixture(scope="session")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], NotebookNode]:
    """Returns a lab after a run of all of its cells, with the exercises solved at its end.

    Where the browser's suite has run it before, that run; else one without a browser.
    """

    def run(name: str) -> NotebookNode:
        notebook = labs.noted_run(name)
        if notebook is None:
            notebook = labs.solved(name)
            state = str(tmp_path_factory.mktemp("state"))
            client = NotebookClient(
                notebook,
                timeout=120,
                kernel_name="python3",
                # What fails is found in the outputs, whole and with the cells after it.
                allow_errors=True,
                resources={"metadata": {"path": labs.path_of(name).parent}},
            )
            client.execute(env=os.environ | {"XDG_STATE_HOME": state, "IPYTHONDIR": state})
            labs.note_run(name, notebook)
        return notebook

    return run
