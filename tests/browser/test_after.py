"""The view that stays when a cell has ended: the same one, on the same page and on later ones."""

from __future__ import annotations

import re

from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser import widths
from tests.browser.conftest import PICTURES

CELLS = [
    "%load_ext allranks\n%distributed start -n 4",
    """%%distributed --view full
import os, time
import numpy as np
for step in range(2000):
    allreduce(np.ones(1000), name="gradients")
    log(step=step, loss=1 / (step + 1) + rank / 9, accuracy=1 - 1 / (step + 2))
    if step > 200 and os.path.exists("enough"): break
    time.sleep(0.01)
print("trained")
""",
    "%%distributed --view full\nfor step in range(200): log(step=step, loss=1 / (step + 3) ** 2)\n"
    "for line in range(100): print(f'{line:300}')",
    "%distributed compare 2 3",
]
#: Notes the height of the panel's output in every picture that the page draws.
WATCH = """() => {
    const cell = document.querySelectorAll(".jp-Notebook .jp-Cell")[1];
    window.heights = new Set();
    const look = () => {
        const panel = cell.querySelector(".jp-OutputArea-child");
        window.heights.add(Math.round(panel.getBoundingClientRect().height));
        requestAnimationFrame(look);
    };
    look();
}"""
#: What a reader has chosen, and where the panel stands.
CHOSEN = """panel => ({
    size: [panel.offsetWidth, panel.offsetHeight],
    checked: [...panel.querySelectorAll(".ar-bar input[type=checkbox]")].map(one => one.checked),
    smoothing: panel.querySelector("input[type=range]").value,
    selected: [...panel.querySelectorAll("[aria-pressed=true] b")].map(one => one.textContent),
    closed: [...panel.querySelectorAll("[aria-expanded=false]")].map(one => one.textContent),
    lines: [...panel.querySelectorAll("canvas")].map(one => one.getAttribute("aria-label")),
})"""


def panel(lab):
    return lab.output(1).locator(".ar-dashboard")


def explore(lab):
    """Looks where the time went, hovers over a curve, and leaves all as it was."""
    time = panel(lab).get_by_role("button", name="time", exact=True)
    time.click()
    strips = panel(lab).locator(".ar-strips canvas[aria-label*='rank 3 ']")
    expect(strips).to_be_visible()
    lab.wait_drawn(strips)
    expect(panel(lab).locator(".ar-panel-time td").first).to_be_visible()
    lab.picture_of(1, PICTURES / "after-time.png")
    time.click()
    canvas = lab.output(1).locator("canvas[aria-label^='loss:']")
    canvas.hover(position={"x": 200, "y": 80})
    tip = lab.output(1).locator(".ar-tip:visible")
    expect(tip).to_contain_text(re.compile(r"step \d+"))
    expect(tip).to_contain_text("rank 3")
    lab.page.mouse.move(2, 2)


def look_at_all_of_it(lab):
    time = panel(lab).get_by_role("button", name="time", exact=True)
    time.click()
    strips = panel(lab).locator(".ar-strips canvas")
    widths.check(lab, 1, "after", (panel(lab), 0.95), (strips, 0.5))
    time.click()


def test_the_same_view_stays_after_the_cell_and_in_a_saved_notebook(lab, server, tmp_path):
    path = server.add(new_notebook(cells=[new_code_cell(source) for source in CELLS]))
    lab.open(path)
    lab.run_cell(0)
    lab.run_cell(1)
    canvas = lab.output(1).locator("canvas[aria-label^='loss:']")
    expect(canvas).to_have_count(1, timeout=120_000)
    panel(lab).get_by_label("smoothing").fill("60")
    panel(lab).locator(".ar-tile").nth(2).click()
    panel(lab).get_by_role("button", name="logs").click()
    expect(canvas).to_have_attribute("aria-label", re.compile(r"rank 3 .* at step [\d,]{2,}"))
    # What every rank tells of its calls comes by itself, and makes the panel higher.
    expect(panel(lab).locator(".ar-bar-row")).to_have_count(4)
    expect(panel(lab).locator(".ar-straggler")).to_contain_text("came last in")
    lab.wait_painted()
    live = panel(lab).evaluate(CHOSEN)
    lab.picture_of(1, PICTURES / "after-1-live.png")
    lab.page.evaluate(WATCH)
    (server.root / "enough").touch()
    lab.wait_for(1, "trained")
    lab.wait_idle()

    # The page does not jump, and a linear axis stays linear.
    expect(panel(lab).get_by_role("button", name="Interrupt")).to_be_hidden()
    ended = panel(lab).evaluate(CHOSEN)
    lab.picture_of(1, PICTURES / "after-2-ended.png")
    assert {**ended, "lines": 0} == {**live, "lines": 0}
    assert lab.page.evaluate("[...heights]") == [live["size"][1]]
    explore(lab)
    look_at_all_of_it(lab)
    panel(lab).get_by_label("log scale").check()
    panel(lab).get_by_label("log scale").uncheck()
    for index in (2, 3):
        lab.run_cell(index)
        lab.wait_idle()
    both = lab.output(3).locator("canvas[aria-label^='loss:']")
    expect(both).to_have_attribute("aria-label", re.compile("cell 2 .*, cell 3 .* at step 199"))
    lab.picture_of(3, PICTURES / "after-5-compared.png")
    assert lab.complaints == []
    saved = lab.save()
    lab.close()

    lab.open_without_kernel(path, trusted=True)
    expect(panel(lab)).to_be_visible(timeout=30_000)
    expect(canvas).to_have_attribute("aria-label", ended["lines"][0])
    assert panel(lab).evaluate(CHOSEN) == ended
    explore(lab)
    lab.picture_of(1, PICTURES / "after-3-reopened.png")
    # It says how much of the output is not in the notebook.
    said = lab.output(2).locator(".ar-panel-logs .ar-said")
    expect(said).to_contain_text(re.compile(r"^\d+ lines, 8\d.* kB more in the log files$"))
    # So it does in a page that nbconvert makes.
    page, _ = HTMLExporter().from_filename(saved)
    (tmp_path / "page.html").write_text(page)
    lab.page.route("http*://**", lambda route: route.abort())
    lab.page.goto(f"file://{tmp_path}/page.html")
    alone = lab.page.locator(".ar-dashboard").first
    expect(alone).to_be_visible(timeout=30_000)
    assert alone.evaluate(CHOSEN)["lines"] == ended["lines"]
    lab.page.unroute_all()
    # Where the notebook is not trusted, its picture stands there.
    lab.open_without_kernel(path)
    expect(lab.output(1).locator("img[src^='data:image/svg+xml']")).to_have_count(4)
    assert panel(lab).count() == 0
    pictures = lab.output(1).locator(".jp-RenderedHTMLCommon > *").first
    widths.check(lab, 1, "after-untrusted", (pictures, 0.95))
    lab.picture_of(1, PICTURES / "after-4-untrusted.png")
