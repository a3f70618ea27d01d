"""The requirements of the import, and the error without TensorFlow."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest


def test_a_missing_tensorflow_comes_with_the_install_line() -> None:
    code = "import sys; sys.modules['tensorflow'] = None; import allranks.tensorflow"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "allranks.errors.MissingDependency: allranks.tensorflow needs TensorFlow"
    )
    assert last.endswith('pip install "allranks[tensorflow]"')


def test_numpy_is_accepted_as_far_back_as_tensorflow_accepts_it() -> None:
    if find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow: pip install 'allranks[tensorflow]'")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ours, theirs = (
        re.search(r"numpy>=([\d.]+)", " ".join(needs))
        for needs in (project["dependencies"], metadata.requires("tensorflow"))
    )
    least = [tuple(map(int, found[1].split(".")[:2])) for found in (ours, theirs)]
    assert least[0] <= least[1]
