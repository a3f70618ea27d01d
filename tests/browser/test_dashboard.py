"""The live view in a real JupyterLab: it moves, it listens, and it leaves a picture behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser import widths
from tests.browser.conftest import PICTURES, page_with_ranks

#: What a screen reader hears of a curve that both ranks have points of.
BOTH = re.compile(r"rank 0 .* at step \d+.*rank 1 .* at step \d+")

START = "%load_ext allranks\n%distributed start -n 2"

TRAINING = """%%distributed
import sys, time
import numpy as np
for step in range(3000):
    time.sleep(0.04 + 0.02 * (rank == size - 1))
    allreduce(np.ones(10_000, np.float32), name="gradients")
    log(step=step, loss=1 / (step + 1) + rank)
    if step % 10 == 0:
        print("epoch", step)
        print("rank", rank, "says", step, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def lab(browser, server):
    """One page for all tests of this file, and two ranks; the last tests have four."""
    with page_with_ranks(browser, server, START, "") as lab:
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


@pytest.fixture
def four_running(lab, running):
    lab.replace(0, "%distributed restart -n 4")
    lab.start_ranks()
    return running


def steps_of(lab, metric="loss"):
    said = lab.output(1).locator(f"canvas[aria-label^='{metric}:']").get_attribute("aria-label")
    return [int(step.replace(",", "")) for step in re.findall(r"at step ([\d,]+)", said)]


def wait_for_steps(lab, step):
    lab.page.wait_for_function(
        """least => {
            const canvas = document.querySelector("canvas[aria-label^='loss:']");
            const steps = canvas?.getAttribute("aria-label").match(/at step [0-9,]+/g) ?? [];
            return steps.length === 2
                && steps.every(step => Number(step.replace(/[^0-9]/g, "")) >= least);
        }""",
        arg=step,
        timeout=60_000,
    )


def button(lab, name):
    return lab.output(1).get_by_role("button", name=name)


def test_points_arrive_while_the_cell_runs_and_interrupt_ends_it(running):
    lab = running(TRAINING)
    canvas = lab.output(1).locator("canvas[aria-label^='loss:']")
    expect(canvas).to_have_count(1)
    expect(canvas).to_have_attribute("aria-label", BOTH)
    # It fails unless the first click counts.
    lab.output(1).get_by_label("mean and spread").check()
    lab.output(1).get_by_label("mean and spread").uncheck()
    expect(canvas).to_have_attribute("aria-label", BOTH)
    wait_for_steps(lab, steps_of(lab)[0] + 40)
    lab.wait_drawn(canvas)
    lab.picture_of(1, PICTURES / "dashboard-live.png")

    button(lab, "Interrupt").click()
    lab.wait_idle()
    assert "KeyboardInterrupt" in lab.outputs_text(1)
    assert lab.output(1).locator(".ar-dashboard").count() == 1
    expect(lab.output(1).get_by_role("button", name="Interrupt", exact=True)).to_have_count(0)
    assert lab.complaints == []


BUSY = """() => jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === "busy"
"""
LATE = """    while step == 50 and rank and not os.path.exists("everybody may go on"):
        time.sleep(0.1)
"""


def test_a_running_cell_shows_where_its_ranks_are_and_who_is_late(running):
    start, loop, rest = TRAINING.partition("range(3000):\n")
    lab = running(start.replace("import sys", "import os, sys") + loop + LATE + rest)
    button(lab, "Where are they?").click(timeout=30_000)
    stacks = lab.output(1).get_by_role("region", name="where each rank is now").locator("details")
    expect(stacks).to_have_count(2)
    stacks.first.locator("summary").click()
    expect(stacks.first.locator("pre")).to_contain_text(re.compile(r"In\[\d+\]"))
    # Rank 0 waits, and first of all its tile says for whom.
    status = lab.output(1).locator(".ar-status")
    expect(status).to_contain_text("1 running, 1 waits for rank 1")
    waiting = lab.output(1).locator(".ar-tile[data-state='waiting'] .ar-state")
    expect(waiting).to_have_text(re.compile("^◷ waits for rank 1 in allreduce"))
    widths.check(lab, 1, "waiting", (lab.output(1).locator(".ar-tiles"), 0.95))
    lab.picture_of(1, PICTURES / "dashboard-waiting.png")
    (lab.server.root / "everybody may go on").touch()
    straggler = lab.output(1).locator(".ar-straggler")
    expect(straggler).to_contain_text(re.compile("rank 1 came last in"))

    tile = lab.output(1).locator(".ar-tile").nth(1)
    tile.click()
    expect(tile).to_have_attribute("aria-pressed", "true")
    expect(lab.output(1).locator(".ar-bar-row").nth(0)).to_have_class(re.compile("ar-faded"))
    expect(lab.output(1).locator(".ar-bar-row").nth(1)).not_to_have_class(re.compile("ar-faded"))

    with lab.page.expect_download() as saved:
        button(lab, "Save").click()
    rows = Path(saved.value.path()).read_text().splitlines()
    assert rows[:2] == ["name,rank,member,step,value", "loss,0,,0,1"]
    lab.interrupt()
    lab.wait_idle()
    assert lab.complaints == []


FLOOD = """%%distributed --view full
import sys, time
for block in range(100):
    for line in range(block * 1000, block * 1000 + 1000):
        print(f"line {line} of rank {rank}" + (" needle" if line % 10_000 == 7 else ""))
    print("a warning", block, file=sys.stderr, flush=True)
    time.sleep(0.05)
for second in range(600):
    print("still here", second, flush=True)
    time.sleep(0.2)
"""


def test_logs_are_searched_while_400000_lines_stream_and_clicks_are_answered(four_running):
    lab = four_running(FLOOD)
    log = lab.output(1).get_by_role("log")
    said = lab.output(1).locator(".ar-panel-logs .ar-said")
    expect(said).to_contain_text(re.compile(r"\d\d,\d{3} lines"), timeout=60_000)

    # The lines still stream in: the page answers clicks all the same.
    title = button(lab, "timings")
    for expanded in ("false", "true", "false"):
        title.click()
        expect(title).to_have_attribute("aria-expanded", expanded)

    search = lab.output(1).get_by_role("searchbox")
    search.fill("needle")
    expect(log.locator("mark").first).to_have_text("needle")
    expect(said).to_contain_text(re.compile(r"^40 of 4\d\d,\d{3} lines"), timeout=90_000)
    lab.picture_of(1, PICTURES / "dashboard-search.png")

    search.fill("a warning 99")
    expect(log.locator(".ar-err")).to_have_count(1)
    expect(log.locator(".ar-err b")).to_have_text("ranks 0–3")
    search.fill("")
    expect(log).to_contain_text("still here")
    lab.output(1).locator(".ar-tile").nth(2).click()
    expect(said).to_contain_text("of rank 2")

    button(lab, "Interrupt").click()
    lab.wait_idle()
    assert lab.complaints == []
    saved = lab.save()
    assert saved.stat().st_size < 1_000_000
