"""Every lab in a real JupyterLab, from "Run all" to the end of its ranks."""

from __future__ import annotations

import nbformat
import pytest

from tests import labs
from tests.browser.conftest import PICTURES
from tests.labs import FAILS, LABS

# A live view is gone when its cell has ended: it is counted as it comes.
WATCH = """() => {
    window.panels = new Set();
    new MutationObserver(() => {
        for (const panel of document.querySelectorAll(".ar-dashboard, .ar-explainer")) {
            window.panels.add(panel);
        }
    }).observe(document.body, { childList: true, subtree: true });
}"""


@pytest.mark.parametrize("name", LABS)
def test_a_lab_runs_in_the_browser(lab, server, name):
    committed = labs.read(name)
    lab.open(server.add(labs.path_of(name)))
    lab.command("notebook:clear-all-cell-outputs")
    last = len(committed.cells) - 1
    assert lab.outputs_text(last) == ""
    lab.page.evaluate(WATCH)
    lab.run_all()
    lab.wait_for(last, "The ranks are stopped.", timeout=270)
    lab.wait_idle()

    saved = nbformat.read(lab.save(), as_version=4)
    assert labs.failed(saved) == labs.tagged(committed, FAILS)
    for cell, ran in zip(labs.code_cells(committed), labs.code_cells(saved), strict=True):
        assert (cell.id, labs.steady_lines(cell)) == (cell.id, labs.steady_lines(ran))
    assert lab.page.evaluate("() => window.panels.size") > 0
    assert lab.page.locator(".allranks-still img").count() > 0
    for index, cell in enumerate(committed.cells):
        if cell.cell_type == "code":
            lab.picture_of(index, PICTURES / name / f"{index:02}-{cell.id}.png")
    assert lab.complaints == []
