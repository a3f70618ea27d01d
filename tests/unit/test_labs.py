"""What labs say where a package is missing."""

import importlib.util
from pathlib import Path

import nbformat
import pytest

LABS = Path(__file__).parents[2] / "notebooks"


def test_lab_7_prints_the_command_that_installs_its_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = nbformat.read(LABS / "07_torch.ipynb", as_version=4)
    (source,) = (cell.source for cell in lab.cells if cell.id == "load")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(source.replace("%load_ext allranks", ""), {})
    assert "Type in a cell: %pip install torch scikit-learn" in capsys.readouterr().out
