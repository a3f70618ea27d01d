"""A few of mpi4py's own tests, on our communicators; all of them: see mpi4py_own/suite.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("mpi4py_own")))

import suite


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return suite.download(tmp_path_factory.mktemp("mpi4py"))
    except OSError as error:
        pytest.skip(f"mpi4py's tests come with its source, which needs the package index: {error}")


def test_mpi4pys_own_tests_pass_but_for_those_with_a_reason(tests: Path) -> None:
    told = suite.play(tests, 2, *suite.FEW)
    for module in suite.FEW:
        ran = {test: text for test, text in told.items() if test.startswith(f"{module}.")}
        failed = suite.failures(ran)
        assert {test: text for test, text in failed.items() if suite.reason(test) is None} == {}
        assert len(failed) < len(ran) / 4
