"""A lab in a real JupyterLab, its exercises solved, from "Run all" to the end of its ranks."""

from __future__ import annotations

import nbformat
import pytest

from tests import labs
from tests.labs import FAILS

# A live view is replaced when its cell has ended: it is counted as it comes.
WATCH = """() => {
    window.panels = new Set();
    new MutationObserver(() => {
        for (const panel of document.querySelectorAll(".ar-dashboard, .ar-explainer")) {
            window.panels.add(panel);
        }
    }).observe(document.body, { childList: true, subtree: true });
}"""


# It shows what others show, and a player. They run without a browser; for the panel of an ensemble
# see test_ensemble.py.
@pytest.mark.timeout(600)
def test_a_lab_runs_in_the_browser(lab, server):
    name = "02_allreduce"
    solved = labs.solved(name)
    lab.open(server.add(solved, f"{name}.ipynb"))
    lab.command("notebook:clear-all-cell-outputs")
    last = len(solved.cells) - 1
    assert lab.outputs_text(last) == ""
    lab.page.evaluate(WATCH)
    lab.run_all()
    lab.wait_for(last, "The ranks are stopped.", timeout=480)
    lab.wait_idle()

    saved = nbformat.read(lab.save(), as_version=4)
    # What the cells say is compared in tests/notebook/test_labs.py.
    assert labs.failed(saved) == labs.tagged(solved, FAILS)
    assert lab.page.evaluate("() => window.panels.size") > 0
    assert lab.page.locator(".ar-dashboard, .allranks-still img").count() > 0
    assert lab.complaints == []
