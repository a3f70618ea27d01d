"""Where the ranks' time goes, while the cell runs: strips to look closer at, and a flame graph.

Everybody can read and use the panel: axe-core finds nothing in it, live and after the cell.
"""

from __future__ import annotations

import re

from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser import axe
from tests.browser.test_after import CHOSEN, WATCH

CELLS = [
    # Long enough to press the button again while it is being profiled.
    "%load_ext allranks\nfrom allranks.widgets.dashboard import view\n"
    "view.PROFILE_SECONDS = 12\n%distributed start -n 4",
    """%%distributed
import os, sys, time
import numpy as np
for step in range(100_000):
    allreduce(np.ones(1000), name="gradients")
    log(step=step, loss=1 / (step + 1) + rank / 9, broken=float("nan") if step == 5 else 1)
    if step == 10: print("epoch", step); print("a warning of", rank, file=sys.stderr)
    time.sleep(0.01)
    while step == 20 and rank == 3 and not os.path.exists("come"): time.sleep(0.05)
    if step > 40 and os.path.exists("enough"): break
print("trained")
""",
]
#: Rank 0 has done little else than to wait, for a call that has not ended.
WAITS = re.compile(r"rank 0 .*waiting (?:[6-9]\d|100) %.*rank 3 ((?!waiting).)*computing \d\d")


def panel(lab):
    return lab.output(1).locator(".ar-dashboard")


def strips(lab):
    return panel(lab).locator(".ar-strips canvas")


def press(lab, name):
    panel(lab).get_by_role("button", name=name, exact=True).click()


def shows(lab, began, ended):
    said = re.compile(f"^each rank's time from {began} to {ended}: rank 0 ")
    expect(strips(lab)).to_have_attribute("aria-label", said)


def zoomed(lab):
    said = strips(lab).get_attribute("aria-label")
    found = re.findall(r"([\d.,]+) s", said.partition(":")[0])
    return [float(second.replace(",", "")) for second in found]


def look_closer(lab):
    strips(lab).hover(position={"x": 200, "y": 30})
    lab.page.mouse.down()
    strips(lab).hover(position={"x": 400, "y": 30})
    expect(panel(lab).locator(".ar-picked")).to_be_visible()
    lab.page.mouse.up()
    expect(panel(lab).locator(".ar-picked")).to_be_hidden()
    shows(lab, r"[\d.,]+ s", r"[\d.,]+ s")
    expect(panel(lab).get_by_text("time in this part of the cell")).to_be_visible()
    first = zoomed(lab)
    strips(lab).focus()
    for key in ("+", "ArrowLeft", "-"):
        before = strips(lab).get_attribute("aria-label")
        strips(lab).press(key)
        expect(strips(lab)).not_to_have_attribute("aria-label", before)
    strips(lab).hover(position={"x": 300, "y": 30})
    lab.page.keyboard.down("Shift")
    before = strips(lab).get_attribute("aria-label")
    lab.page.mouse.wheel(0, -100)
    expect(strips(lab)).not_to_have_attribute("aria-label", before)
    lab.page.keyboard.up("Shift")
    lab.page.mouse.move(2, 2)
    assert zoomed(lab) != first
    for name in ("zoom in", "earlier", "later", "zoom out"):
        before = strips(lab).get_attribute("aria-label")
        press(lab, name)
        expect(strips(lab)).not_to_have_attribute("aria-label", before)
    press(lab, "whole cell")
    shows(lab, "0 s", r"[\d.,]+ s")


def test_the_strips_grow_while_the_cell_runs_and_what_is_chosen_later_is_saved(lab, server):
    for name in ("come", "enough"):
        (server.root / name).unlink(missing_ok=True)
    path = server.add(new_notebook(cells=[new_code_cell(source) for source in CELLS]))
    lab.open(path)
    lab.run_all()
    panel(lab).get_by_role("button", name="time", exact=True).click(timeout=90_000)
    # A wait that goes on is a wait, and not the cell's own work.
    expect(strips(lab)).to_have_attribute("aria-label", WAITS, timeout=60_000)
    rows = panel(lab).get_by_role("table", name="time", exact=True).locator("tbody tr")
    expect(rows).to_have_count(4)
    look_closer(lab)

    press(lab, "Profile")
    said = panel(lab).locator(".ar-profiled")
    expect(said).to_have_text("profiling the next 5 s")
    press(lab, "Profile")
    expect(said).to_contain_text("this cell is being profiled")
    graph = lab.output(1).get_by_role("img", name="flame graph")
    expect(graph).to_be_visible(timeout=60_000)
    expect(said).to_have_text("the flame graph is below")
    expect(lab.output(1)).to_contain_text("profile of ranks 0–3")

    found = axe.look(lab, 1, "time-live")
    strips(lab).focus()
    strips(lab).press("+")
    (server.root / "come").touch()
    lab.page.wait_for_function(
        """() => {
            const canvas = document.querySelector("canvas[aria-label^='loss:']");
            return /at step (?:[4-9]\\d|[\\d,]{3,})/.test(canvas.getAttribute("aria-label"));
        }""",
        timeout=60_000,
    )
    steps = panel(lab).get_by_role("table", name="a step").locator("tbody tr")
    expect(steps).to_have_count(4)
    lab.wait_painted()
    live, part = panel(lab).evaluate(CHOSEN), zoomed(lab)
    lab.page.evaluate(WATCH)
    (server.root / "enough").touch()
    lab.wait_for(1, "trained")
    lab.wait_idle()

    # The page does not jump, and the same part of the time is looked at.
    assert lab.page.evaluate("[...heights]") == [live["size"][1]]
    assert zoomed(lab) == part
    expect(panel(lab).get_by_role("button", name="Profile")).to_be_hidden()
    expect(graph).to_be_visible()
    look_closer(lab)
    found += axe.look(lab, 1, "time-after")
    assert "\n".join(found) == ""

    panel(lab).get_by_label("smoothing").fill("70")
    panel(lab).get_by_label("log scale").check()
    panel(lab).locator(".ar-tile").nth(1).click()
    press(lab, "timings")
    press(lab, "zoom in")
    lab.wait_painted()
    chosen, part = panel(lab).evaluate(CHOSEN), zoomed(lab)
    lab.save()
    # The view is drawn anew, as it was, and what was pressed can be pressed again.
    assert panel(lab).count() == 1
    assert panel(lab).evaluate(CHOSEN) == chosen
    expect(panel(lab).get_by_role("button", name="zoom in")).to_be_focused()
    assert lab.complaints == []
    lab.close()

    lab.open_without_kernel(path, trusted=True)
    expect(panel(lab)).to_be_visible(timeout=30_000)
    again = panel(lab).evaluate(CHOSEN)
    # What was said of the profile is not kept.
    assert {**again, "size": 0, "lines": 0} == {**chosen, "size": 0, "lines": 0}
    assert zoomed(lab) == part
