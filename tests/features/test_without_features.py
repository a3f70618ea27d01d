"""The core works where every feature was deleted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allranks import features

ROOT = Path(__file__).parents[2]
#: Output, errors and unreadable messages of real ranks and notebooks, and all unit tests.
CORE = (
    *("tests/faults/test_output.py", "tests/faults/test_unreadable.py", "tests/widgets"),
    *(
        f"tests/unit/{part}"
        for part in ("cluster", "collectives", "engine", "magics", "records", "widgets")
    ),
)


@pytest.fixture
def without_features(tmp_path: Path) -> Path:
    """A copy of the package without its features."""
    names = {name + end for name in features.BUILT_IN for end in ("", ".py")}

    def ignored(folder: str, found: list[str]) -> set[str]:
        hidden = names if Path(folder) == ROOT / "allranks" / "features" else set()
        return {"__pycache__"} | (hidden & set(found))

    shutil.copytree(ROOT / "allranks", tmp_path / "allranks", ignore=ignored)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert sorted(os.listdir(tmp_path / "allranks" / "features")) == ["__init__.py"]
    return tmp_path


@pytest.mark.timeout(900)
def test_the_tests_of_the_core_pass_without_any_feature(without_features: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # The plugin of the installed package is a feature, too.
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = "-p", "xdist", "-p", "pytest_timeout"
    without = "-m", "not replaces"  # a feature replaces dead ranks
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n0",
            "-q",
            "-p",
            "no:cacheprovider",
            *plugins,
            *CORE,
            *without,
        ],
        cwd=without_features,
        env=env | {"PYTHONPATH": str(without_features)},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout
