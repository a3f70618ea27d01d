"""The notebooks that the faults are tried in."""

from contextlib import ExitStack

import pytest

from tests.faults.notebook import KEPT, Notebook


@pytest.fixture(scope="session")
def shared_notebook(tmp_path_factory):
    """One notebook for all files; at the end nothing is left."""
    with Notebook(tmp_path_factory.mktemp("notebook")) as shared:
        yield shared
        shared.shutdown()
        shared.check_nothing_left()


@pytest.fixture(scope="module")
def notebook(shared_notebook):
    """That notebook, with four fresh ranks for each file, each with ``kept``."""
    cell = shared_notebook.on_ranks("kept = 10 * rank", "-n 4")
    assert cell.status == "ok", cell.text
    shared_notebook.run("%distributed heal on")
    shared_notebook.note_files()
    yield shared_notebook
    shared_notebook.settle()
    shared_notebook.run("%distributed stop")


@pytest.fixture
def _ranks_live_on(notebook):
    yield
    notebook.settle()
    assert notebook.on_ranks("kept").text == KEPT


@pytest.fixture
def new_notebook(tmp_path):
    """Opens notebooks, ``new_notebook(env={…})``, that are closed with the test."""
    with ExitStack() as stack:

        def open_one(env: dict[str, str | None] | None = None) -> Notebook:
            cwd = tmp_path / f"notebook{len(list(tmp_path.iterdir()))}"
            cwd.mkdir()
            return stack.enter_context(Notebook(cwd, env))

        yield open_one


@pytest.fixture(scope="module")
def own_notebook(tmp_path_factory):
    """A notebook without ranks, for all tests of a file."""
    with Notebook(tmp_path_factory.mktemp("notebook")) as opened:
        yield opened
