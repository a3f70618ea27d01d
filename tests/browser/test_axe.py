"""Everybody can read and use the panel: axe-core finds nothing in it, live and after the cell."""

from __future__ import annotations

import re

from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser import axe, widths
from tests.browser.conftest import PICTURES
from tests.missing import skip_missing

CELLS = [
    "%load_ext allranks\n%distributed start -n 4",
    """%%distributed --view full
import os, sys, time
import numpy as np
for step in range(100_000):
    time.sleep(0.01 + 0.02 * (rank == 3))
    allreduce(np.ones(1000), name="gradients")
    log(step=step, loss=1 / (step + 1) + rank / 9, broken=float("nan") if step == 5 else 1)
    if step % 20 == 0: print("epoch", step); print("a warning of", rank, file=sys.stderr)
    if os.path.exists("enough"): break
""",
    """%%ensemble lr=0.1,0.2 seed=0:3 --metric loss
import os, time
if lr == 0.2 and seed == 1: raise ValueError("a member that fails")
for step in range(100_000):
    log(step=step, loss=lr / (step + 1))
    time.sleep(0.01)
    if os.path.exists("enough"): break
""",
]
THEMES = ("JupyterLab Light", "JupyterLab Dark")


def look(lab, index, name, part=".ar-dashboard"):
    """What axe-core finds in the panel of a cell, in both themes; with pictures of both sizes."""
    source = axe.script()
    found = []
    for theme in THEMES:
        lab.choose_theme(theme)
        lab.page.wait_for_timeout(600)
        for width, height in widths.SIZES:
            lab.page.set_viewport_size({"width": width, "height": height})
            panel = lab.output(index).locator(part)
            panel.scroll_into_view_if_needed()
            panel.screenshot(path=PICTURES / f"axe-{name}-{theme.split()[1].lower()}-{width}.png")
        found += [
            f"{name}, {theme}: {one}" for one in axe.problems(lab.page, source, ".ar-dashboard")
        ]
    return found


def test_axe_finds_nothing_in_the_panels_of_a_cell_and_of_an_ensemble(lab, server):
    if axe.script() is None:
        skip_missing(axe.MISSING)
    lab.open(server.add(new_notebook(cells=[new_code_cell(source) for source in CELLS])))
    lab.run_cell(0)
    found = []
    for index, name in ((1, "cell"), (2, "ensemble")):
        lab.run_cell(index)
        canvas = lab.output(index).locator("canvas[aria-label^='loss:']")
        expect(canvas).to_have_attribute(
            "aria-label", re.compile(r"at step [\d,]{2,}"), timeout=90_000
        )
        lab.page.wait_for_timeout(1000)
        widths.check(lab, index, f"{name}-live", (lab.output(index).locator(".ar-dashboard"), 0.95))
        found += look(lab, index, f"{name}-live")
        (server.root / "enough").touch()
        lab.wait_idle()
        found += look(lab, index, f"{name}-after")
        (server.root / "enough").unlink()
        # axe-core looks at the whole page, in which two panels would have the same names.
        lab.command("notebook:clear-all-cell-outputs")
    assert "\n".join(found) == ""
