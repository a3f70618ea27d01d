"""The notebook of the tests with simulated ranks."""

import pytest

from tests.faults.notebook import Notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    with Notebook(tmp_path_factory.mktemp("notebook")) as opened:
        yield opened
        opened.shutdown()
        opened.check_nothing_left()
