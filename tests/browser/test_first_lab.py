"""The first lab in a real JupyterLab: what a newcomer sees after "Run all"."""

from __future__ import annotations

import nbformat
import pytest

from tests.browser.conftest import PICTURES


@pytest.fixture
def path(repository):
    return repository / "notebooks" / "01_ranks.ipynb"


@pytest.fixture
def index(path):
    """Where each cell stands, by name."""
    cells = nbformat.read(path, as_version=4).cells
    return {cell.id: number for number, cell in enumerate(cells)}


def test_the_first_lab_runs_in_the_browser(lab, server, path, index):
    lab.open(server.add(path))
    lab.command("notebook:clear-all-cell-outputs")
    assert lab.outputs_text(index["stop"]) == ""
    lab.run_all()
    lab.wait_for(index["stop"], "The ranks are stopped.", timeout=240)
    lab.wait_idle()

    assert "ranks 0–3 │ Good morning!" in lab.outputs_text(index["hello"])
    assert "450 of 1797 images" in lab.outputs_text(index["shares"])
    assert lab.output(index["draw-shares"]).locator("img").count() == 4
    assert lab.output(index["picture"]).locator("img").count() == 1
    for rank in range(4):
        told = f"rank {rank} has the counts and the mean of the whole set"
        assert told in lab.outputs_text(index["compare"])

    assert "IndexError: index 10 is out of bounds" in lab.outputs_text(index["one-raises"])
    assert "array(1797)" in lab.outputs_text(index["still-there"])
    assert "before" not in lab.outputs_text(index["syntax-error"])
    assert "ended with exit code 3" in lab.outputs_text(index["death"])
    assert "allranks started again ranks 0–3" in lab.outputs_text(index["fresh"])

    for name in ("hello", "draw-shares", "picture", "one-raises", "death"):
        lab.picture_of(index[name], PICTURES / f"first-lab-{name}.png")
    assert lab.complaints == []
