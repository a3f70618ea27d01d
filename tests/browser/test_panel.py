"""The live view in a real JupyterLab, and the same view after its cell and on later pages.

Everybody can read and use the panel: axe-core finds nothing in it, live and after the cell.
"""

from __future__ import annotations

import re

import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import expect

from tests.browser import axe, firefox, widths
from tests.browser.conftest import PICTURES, page_with_ranks

#: What a screen reader hears of a curve that all ranks have points of.
ALL = re.compile(r"rank 0 .* at step \d+.*rank 3 .* at step \d+")

# Long enough to press the button again while a cell is being profiled.
START = """%load_ext allranks
from allranks.features.profile import notebook
notebook.PANEL_SECONDS = 40
%distributed start -n 4"""

TRAINING = """%%distributed
import os, sys, time
import numpy as np
print("begins")
while not os.path.exists("the text has come"): time.sleep(0.05)
for step in range(3000):
    while step == 50 and rank == 1 and not os.path.exists("everybody may go on"): time.sleep(0.1)
    time.sleep(0.04 + 0.02 * (rank == 1))
    allreduce(np.ones(10_000, np.float32), name="gradients")
    log(step=step, loss=1 / (step + 1) + rank)
    if step % 10 == 0:
        print("epoch", step)
        print("rank", rank, "says", step, file=sys.stderr)
"""
FLOOD = """%%distributed --view full
import sys, time
for block in range(100):
    for line in range(block * 1000, block * 1000 + 1000):
        print(f"line {line} of rank {rank}" + (" needle" if line % 10_000 == 7 else ""))
    print("a warning", block, file=sys.stderr, flush=True)
    time.sleep(0.05)
for second in range(3000):
    print("still here", second, flush=True)
    time.sleep(0.2)
"""
WAITING = """%%distributed
import os, sys, time
import numpy as np
for step in range(100_000):
    gradients = np.full(1000, float(os.path.exists("enough")))
    enough = allreduce(gradients, name="gradients")[0] > 0
    log(step=step, loss=1 / (step + 1) + rank / 9, broken=float("nan") if step == 5 else 1)
    if step == 10: print("epoch", step); print("a warning of", rank, file=sys.stderr)
    time.sleep(0.01)
    while step == 20 and rank == 3 and not os.path.exists("come"): time.sleep(0.05)
    if step > 40 and enough: break
print("trained")
"""
# It goes on once each rank has said twice how much memory it uses.
WIDE = """%%distributed --view full
import time
from allranks.engine.telemetry import TelemetrySender
looks, look = [], TelemetrySender.rss_nbytes
TelemetrySender.rss_nbytes = lambda sender: looks.append(None) or look(sender)
while len(looks) < 2: time.sleep(0.05)
TelemetrySender.rss_nbytes = look
for step in range(200): log(step=step, loss=1 / (step + 3) ** 2)
for line in range(100): print(f'{line:300}')"""
#: Rank 0 has done little else than to wait, for a call that has not ended.
WAITS = re.compile(r"rank 0 .*waiting (?:[6-9]\d|100) %.*rank 3 ((?!waiting).)*computing \d\d")

TELLING = """%%distributed
import os, time
for said in ("first", "second", "third"):
    print(said)
    while not os.path.exists(f"after the {said}"): time.sleep(0.05)
    log(step=0, loss=1)
"""

BUSY = """() => jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === "busy"
"""
#: Whether all ranks have come to a step.
CAME = """least => {
    const canvas = document.querySelector("canvas[aria-label^='loss:']");
    const steps = canvas?.getAttribute("aria-label").match(/at step [0-9,]+/g) ?? [];
    return steps.length === 4
        && steps.every(step => Number(step.replace(/[^0-9]/g, "")) >= least);
}"""
#: Whether a chart has the colour of each mark in its legend.
LIKE_LEGEND = """canvas => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const has = new Set();
    for (let i = 0; i < data.length; i += 4)
        has.add(`rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`);
    const marks = canvas.closest(".ar-panel").querySelectorAll(".ar-legend .ar-swatch");
    return marks.length === 4 && [...marks].every(mark => has.has(mark.style.background));
}"""
#: Notes, for each view of the panel, the heights of its output in the pictures that the page draws.
WATCH = """() => {
    const cell = document.querySelectorAll(".jp-Notebook .jp-Cell")[1];
    window.views = [];
    let last;
    const look = () => {
        const view = cell.querySelector(".ar-dashboard");
        if (view !== last) window.views.push([]);
        last = view;
        const output = cell.querySelector(".jp-OutputArea-child");
        const height = view && Math.round(output.getBoundingClientRect().height);
        const heights = window.views.at(-1);
        if (heights.at(-1) !== height) heights.push(height);
        requestAnimationFrame(look);
    };
    look();
}"""
#: Whether the choice of a view is not over the panel.
BESIDE_PANEL = """panel => {
    const chooser = panel.closest(".jp-Cell").querySelector(".jp-allranks-chooser");
    if (!chooser) return false;
    const own = chooser.getBoundingClientRect(), its = panel.getBoundingClientRect();
    return own.top > its.bottom - 1 || own.bottom < its.top + 1;
}"""
#: Whether what the pointer is over hides the last values above the chart.
OVER_LAST_VALUES = """tip => {
    const last = tip.closest(".ar-chart").querySelector(".ar-lasts");
    return tip.getBoundingClientRect().top < last.getBoundingClientRect().bottom;
}"""
#: Numbers of which only a part can be read: in a table, and above a chart.
CUT = """panel => {
    const cells = [...panel.querySelectorAll("td")].filter(
        one => one.scrollWidth > one.clientWidth + 1);
    const lasts = [...panel.querySelectorAll(".ar-lasts > span")].filter(one => {
        const own = one.getBoundingClientRect(), line = one.parentElement.getBoundingClientRect();
        return own.top < line.bottom - 1 && own.right > line.right + 1;
    });
    return [...cells, ...lasts].map(one => one.textContent);
}"""
#: What a reader has chosen.
CHOSEN = """panel => ({
    checked: [...panel.querySelectorAll(".ar-bar input[type=checkbox]")].map(one => one.checked),
    smoothing: panel.querySelector("input[type=range]").value,
    selected: [...panel.querySelectorAll("[aria-pressed=true] b")].map(one => one.textContent),
    closed: [...panel.querySelectorAll(".ar-title[aria-expanded=false]")]
        .map(one => one.textContent),
})"""


@pytest.fixture(scope="module")
def lab(browser, server):
    """One page and four ranks for all tests of this file."""
    with page_with_ranks(browser, server, START, "", WIDE, "") as lab:
        yield lab


@pytest.fixture
def running(lab, request):
    def start(source):
        lab.complaints.clear()
        lab.replace(1, source)
        lab.run_cell(1)
        return lab

    yield start
    lab.screenshot(PICTURES / f"{request.node.name}.png")
    if lab.page.evaluate(BUSY):  # the test has failed: the next one is to have idle ranks
        lab.interrupt()


def panel(lab):
    return lab.output(1).locator(".ar-dashboard")


def curve(lab):
    return lab.output(1).locator("canvas[aria-label^='loss:']")


def strips(lab):
    return panel(lab).locator(".ar-strips canvas")


def button(lab, name, exact=False):
    return lab.output(1).get_by_role("button", name=name, exact=exact)


def came(lab, step):
    lab.page.wait_for_function(CAME, arg=step)


def test_points_arrive_it_shows_where_the_ranks_are_and_interrupt_ends_the_cell(running):
    lab = running(TRAINING)
    # Text comes first, with the choice of a view beside it, and then the panel in its place.
    expect(lab.output(1)).to_contain_text("ranks 0–3 │ begins")
    expect(lab.page.locator(".jp-allranks-chooser")).to_have_count(1)
    (lab.server.root / "the text has come").touch()
    expect(curve(lab)).to_have_count(1)
    expect(curve(lab)).to_have_attribute("aria-label", ALL)
    # It fails unless the first click counts.
    lab.output(1).get_by_label("mean and spread").check()
    lab.output(1).get_by_label("mean and spread").uncheck()
    expect(curve(lab)).to_have_attribute("aria-label", ALL)

    button(lab, "Where are they?").click()
    stacks = lab.output(1).get_by_role("group", name="where each rank is now").locator("details")
    expect(stacks).to_have_count(4)
    stacks.first.locator("summary").click()
    expect(stacks.first.locator("pre")).to_contain_text(re.compile(r"In\[\d+\]"))
    # The others wait, and first of all their tiles say for whom.
    status = lab.output(1).locator(".ar-status")
    expect(status).to_contain_text("1 running, 3 wait for rank 1")
    waiting = lab.output(1).locator(".ar-tile[data-state='waiting'] .ar-state")
    expect(waiting.first).to_have_text(re.compile("^◷ waits for rank 1 in allreduce"))
    widths.check(lab, 1, (lab.output(1).locator(".ar-tiles"), 0.95))
    (lab.server.root / "everybody may go on").touch()
    straggler = lab.output(1).locator(".ar-straggler")
    expect(straggler).to_contain_text(re.compile("rank 1 came last in"))
    spark = lab.output(1).locator(".ar-spark title")
    expect(spark).to_have_text(re.compile(r"^busbw over the cell: .*B/s to .*B/s$"))
    came(lab, 90)
    lab.wait_drawn(curve(lab))

    tile = lab.output(1).locator(".ar-tile").nth(1)
    tile.click()
    expect(tile).to_have_attribute("aria-pressed", "true")
    expect(lab.output(1).locator(".ar-bar-row").nth(0)).to_have_class(re.compile("ar-faded"))
    expect(lab.output(1).locator(".ar-bar-row").nth(1)).not_to_have_class(re.compile("ar-faded"))
    if not firefox.chosen():  # Playwright hears of no downloads there
        with lab.page.expect_download() as saved:
            button(lab, "Save values (CSV)").click()
        assert saved.value.suggested_filename == "curves.csv"
    lab.page.wait_for_function(BESIDE_PANEL, arg=panel(lab).element_handle())

    button(lab, "Interrupt").click()
    lab.wait_idle()
    expect(lab.output(1)).to_contain_text("KeyboardInterrupt")
    expect(panel(lab)).to_have_count(1)
    expect(button(lab, "Interrupt", exact=True)).to_have_count(0)
    wide = lab.page.viewport_size
    lab.page.set_viewport_size({"width": 420, "height": 900})
    lab.page.wait_for_function("innerWidth === 420")
    assert panel(lab).evaluate(CUT) == []
    lab.page.set_viewport_size(wide)
    assert lab.complaints == []


def test_the_tab_of_a_rank_shows_what_it_prints_while_the_cell_runs(running):
    lab = running(TELLING)
    lab.output(1).hover()
    lab.page.get_by_label("tab per rank").click()
    tab = lab.page.locator(".jp-allranks-grid")
    for said in ("first", "second", "third"):
        expect(tab).to_contain_text(said, timeout=30_000)
        (lab.server.root / f"after the {said}").touch()
    lab.wait_idle()
    lab.page.get_by_label("all ranks").click()
    assert lab.complaints == []


def test_logs_are_searched_while_400000_lines_stream_and_clicks_are_answered(running):
    lab = running(FLOOD)
    log = lab.output(1).get_by_role("log")
    said = lab.output(1).locator(".ar-panel-logs .ar-said")
    expect(said).to_contain_text(re.compile(r"\d\d,\d{3} lines"))

    # The lines still stream in: the page answers clicks all the same.
    title = button(lab, "Communication")
    for expanded in ("false", "true", "false"):
        title.click()
        expect(title).to_have_attribute("aria-expanded", expanded)

    search = lab.output(1).get_by_role("searchbox")
    search.fill("needle")
    expect(log.locator("mark").first).to_have_text("needle")
    expect(said).to_contain_text(re.compile(r"^40 of 4\d\d,\d{3} lines"))

    search.fill("")
    expect(log).to_contain_text("still here")
    lab.output(1).locator(".ar-tile").nth(2).click()
    expect(said).to_have_text(re.compile(r"^1\d\d,\d{3} lines of rank 2"))

    button(lab, "Interrupt").click()
    lab.wait_idle()
    assert lab.complaints == []
    saved = lab.save()
    assert saved.stat().st_size < 1_000_000


def zoomed(lab):
    said = strips(lab).get_attribute("aria-label")
    found = re.findall(r"([\d.,]+) s", said.partition(":")[0])
    return [float(second.replace(",", "")) for second in found]


def look_closer(lab):
    """Chooses a part of the time by mouse, keys, wheel and buttons, and goes back."""
    strips(lab).hover(position={"x": 200, "y": 30})
    lab.page.mouse.down()
    strips(lab).hover(position={"x": 400, "y": 30})
    expect(panel(lab).locator(".ar-strips .ar-picked")).to_be_visible()
    lab.page.mouse.up()
    expect(panel(lab).locator(".ar-strips .ar-picked")).to_be_hidden()
    said = r"^each rank's time from {} to [\d.,]+ s: rank 0 "
    expect(strips(lab)).to_have_attribute("aria-label", re.compile(said.format(r"[\d.,]+ s")))
    expect(panel(lab).get_by_text("time of each rank in this part of the cell")).to_be_visible()
    first = zoomed(lab)
    strips(lab).focus()
    for key in ("+", "ArrowLeft", "-"):
        moves(lab, lambda key=key: strips(lab).press(key))
    strips(lab).hover(position={"x": 300, "y": 30})
    lab.page.keyboard.down("Shift")
    moves(lab, lambda: lab.page.mouse.wheel(0, -100))
    lab.page.keyboard.up("Shift")
    lab.page.mouse.move(2, 2)
    assert zoomed(lab) != first
    for name in ("zoom in", "earlier", "later", "zoom out"):
        moves(lab, button(lab, name, exact=True).click)
    button(lab, "whole cell", exact=True).click()
    expect(strips(lab)).to_have_attribute("aria-label", re.compile(said.format("0 s")))


def moves(lab, act):
    before = strips(lab).get_attribute("aria-label")
    act()
    expect(strips(lab)).not_to_have_attribute("aria-label", before)


def profiled(lab):
    """Asks for a flame graph of the running cell, twice."""
    button(lab, "Profile", exact=True).click()
    said = panel(lab).locator(".ar-noted")
    expect(said).to_have_text("profiling the next 5 s")
    button(lab, "Profile", exact=True).click()
    expect(said).to_contain_text("this cell is being profiled")
    graph = lab.output(1).get_by_role("img", name="flame graph")
    expect(graph).to_be_visible()
    expect(said).to_have_text("the flame graph is below")
    expect(lab.output(1)).to_contain_text("profile of ranks 0–3")
    return graph


def tip_of(lab):
    curve(lab).hover(position={"x": 200, "y": 80})
    tip = lab.output(1).locator(".ar-tip:visible")
    expect(tip).to_contain_text(re.compile(r"step \d+"))
    expect(tip).to_contain_text("rank 3")
    expect(tip.locator(".ar-swatch")).to_have_count(4)
    assert not tip.evaluate(OVER_LAST_VALUES)
    # A part of the steps, in all charts, and all of them again.
    whole = button(lab, "all steps", exact=True)
    lab.page.mouse.down()
    curve(lab).hover(position={"x": 300, "y": 80})
    expect(lab.output(1).locator(".ar-chart .ar-picked:visible")).to_have_count(1)
    lab.page.mouse.up()
    expect(whole).to_be_visible()
    curve(lab).press("Escape")
    expect(whole).to_be_hidden()
    # Each chart has one switch for each of its axes.
    switches = panel(lab).locator(".ar-panel-curves :is(button, label)").filter(has_text="log")
    expect(switches).to_have_text(["log x", "log y"] * panel(lab).locator(".ar-chart").count())
    log = button(lab, "log y of loss")
    before = log.get_attribute("aria-pressed")
    log.click()
    expect(log).not_to_have_attribute("aria-pressed", before)
    log.click()
    expect(log).to_have_attribute("aria-pressed", before)
    lab.page.mouse.move(2, 2)


def compared(lab):
    """Two more cells: one writes more than is kept, and one compares its curve with the first's."""
    lab.run_cell(2)
    lab.wait_idle()
    prompts = [lab.page.locator(".jp-InputPrompt").nth(index).inner_text() for index in (1, 2)]
    numbers = [prompt.strip("[]:") for prompt in prompts]
    lab.write(3, f"%distributed compare {' '.join(numbers)}")
    lab.run_cell(3)
    lab.wait_idle()
    both = lab.output(3).locator("canvas[aria-label^='loss:']")
    said = re.compile(f"cell {numbers[0]} .*, cell {numbers[1]} .* at step 199")
    expect(both).to_have_attribute("aria-label", said)


def test_the_view_stays_as_it_was_after_the_cell_and_in_a_saved_notebook(running, server, tmp_path):
    lab = running(WAITING)
    button(lab, "Timeline", exact=True).click()
    # A wait that goes on is a wait, and not the cell's own work.
    expect(strips(lab)).to_have_attribute("aria-label", WAITS)
    rows = panel(lab).get_by_role("table", name="time of each rank", exact=True).locator("tbody tr")
    expect(rows).to_have_count(4)
    look_closer(lab)
    graph = profiled(lab)
    found = axe.look(lab, "live")
    strips(lab).focus()
    strips(lab).press("+")
    panel(lab).get_by_label("smoothing").fill("60")
    panel(lab).locator(".ar-tile").nth(2).click()
    (server.root / "come").touch()
    came(lab, 40)
    steps = panel(lab).get_by_role("table", name="a step").locator("tbody tr")
    expect(steps).to_have_count(4)
    # What every rank tells of its calls comes by itself, and makes the panel higher.
    expect(panel(lab).locator(".ar-bar-row")).to_have_count(4)
    expect(panel(lab).locator(".ar-straggler")).to_contain_text("came last in")
    for name, said in (("busbw", "bus bandwidth"), ("best", "busbw of the fastest call")):
        head = panel(lab).get_by_role("columnheader", name=name, exact=True)
        expect(head).to_have_attribute("title", re.compile(f"^{said}"))
    lab.wait_painted()
    live, part = panel(lab).evaluate(CHOSEN), zoomed(lab)
    lab.page.evaluate(WATCH)
    (server.root / "enough").touch()
    lab.wait_for(1, "trained")
    lab.wait_idle()

    # The page does not jump, and the same part of the time is looked at.
    live_heights, *still_heights = lab.page.evaluate("views")
    # The cause of the wait is found after the end, and is one more line in one more view.
    expect(panel(lab).locator(".ar-time > .ar-cause")).to_contain_text("rank 3 is late")
    (still,), (with_cause,) = still_heights
    assert [still] == live_heights[-1:]
    assert still < with_cause < still + 100
    assert panel(lab).evaluate(CHOSEN) == live
    assert zoomed(lab) == part
    for name in ("Interrupt", "Profile"):
        expect(button(lab, name)).to_be_hidden()
    expect(panel(lab).locator(".ar-status")).to_have_text(re.compile(r"^4 ranks ✓ \d"))
    expect(graph).to_be_visible()
    look_closer(lab)
    tip_of(lab)
    button(lab, "tiles of the ranks").click()
    panel(lab).locator(".ar-tile").nth(2).click()
    found += axe.look(lab, "after")
    # It has changed the theme twice.
    lab.page.wait_for_function(LIKE_LEGEND, arg=curve(lab).element_handle())
    panel(lab).locator(".ar-tile").nth(2).click()
    found += axe.look(lab, "after, rank 2 chosen")
    assert "\n".join(found) == ""
    widths.check(lab, 1, (panel(lab), 0.95), (strips(lab), 0.5))
    button(lab, "log y of loss").click()
    compared(lab)
    lab.output(2).get_by_role("button", name="Timeline", exact=True).click()
    expect(lab.output(2).locator(".ar-memory table")).to_be_visible()
    assert "\n".join(axe.look(lab, "beside others")) == ""
    button(lab, "Communication").click()
    button(lab, "zoom in", exact=True).click()
    lab.wait_painted()
    chosen, part = panel(lab).evaluate(CHOSEN), zoomed(lab)
    curves = curve(lab).get_attribute("aria-label")
    saved = lab.save()
    # The view is drawn anew, as it was, and what was pressed can be pressed again.
    expect(panel(lab)).to_have_count(1)
    assert panel(lab).evaluate(CHOSEN) == chosen
    expect(button(lab, "zoom in", exact=True)).to_be_focused()
    assert lab.complaints == []
    lab.close()

    lab.open_without_kernel(saved.name, trusted=True)
    expect(panel(lab)).to_be_visible()
    expect(curve(lab)).to_have_attribute("aria-label", curves)
    expect(strips(lab)).to_have_attribute("aria-label", re.compile("^each rank's time"))
    assert (panel(lab).evaluate(CHOSEN), zoomed(lab)) == (chosen, part)
    tip_of(lab)
    # It says how much of the output is not in the notebook.
    said = lab.output(2).locator(".ar-panel-logs .ar-said")
    expect(said).to_contain_text(re.compile(r"^\d+ lines, 8\d.* kB more in the log files$"))
    # So it does in a page that nbconvert makes.
    page, _ = HTMLExporter().from_filename(saved)
    (tmp_path / "page.html").write_text(page)
    lab.page.route("http*://**", lambda route: route.abort())
    lab.page.goto(f"file://{tmp_path}/page.html")
    alone = lab.page.locator(".ar-dashboard").first
    expect(alone.locator("canvas[aria-label^='loss:']")).to_have_attribute("aria-label", curves)
    assert alone.evaluate(CHOSEN) == chosen
    lab.page.unroute_all()
    # Where the notebook is not trusted, its picture stands there: two curves and the strips.
    lab.open_without_kernel(saved.name)
    pictures = lab.output(1).locator(".jp-RenderedHTMLCommon > *").first
    expect(pictures.locator("img[src^='data:image/svg+xml']")).to_have_count(3)
    assert panel(lab).count() == 0
    widths.check(lab, 1, (pictures, 0.95))
