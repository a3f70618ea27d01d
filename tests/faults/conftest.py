"""The notebooks that the faults are tried in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.notebook import Notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Four ranks for the tests of one file, each with ``kept``; at the end nothing is left."""
    with Notebook(tmp_path_factory.mktemp("notebook")) as shared:
        shared.on_ranks("kept = 10 * rank", "-n 4")
        shared.note_files()
        yield shared
        shared.shutdown()
        shared.check_nothing_left()


@pytest.fixture
def new_notebook(tmp_path: Path) -> Iterator[Callable[..., Notebook]]:
    """Opens notebooks, ``new_notebook(env={…})``, that are closed with the test."""
    with ExitStack() as stack:

        def open_one(env: dict[str, str | None] | None = None) -> Notebook:
            cwd = tmp_path / f"notebook{len(list(tmp_path.iterdir()))}"
            cwd.mkdir()
            return stack.enter_context(Notebook(cwd, env))

        yield open_one
