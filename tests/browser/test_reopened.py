"""A page that is closed in the middle of a cell and opened again has all that it has missed."""

from __future__ import annotations

import re
import time

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser.conftest import PICTURES

CELLS = [
    "%load_ext allranks\n%distributed start -n 2",
    """%%distributed
import os, time
print("in it")
for step in range(100_000):
    log(step=step, loss=1 / (step + 1) + rank / 9)
    if step == 100: print("unseen")
    if os.path.exists("soon") and step % 100 == 0: print("seen, and more")
    if os.path.exists("enough"): break
    time.sleep(0.01)
print("trained")
if rank == 0: open("over", "w").close()
""",
    "%%distributed\nimport os, time\nprint('before')\n"
    "while not os.path.exists('fail'): time.sleep(0.1)\n1 / 0",
]


def reopen(lab, path):
    close(lab)
    lab.page.goto(f"{lab.server.url}/lab/tree/{path}?token={lab.server.token}")
    lab.page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=60_000)


def close(lab):
    closed, lab.page = lab.page, lab.page.context.new_page()
    closed.close()


def canvas_of(lab):
    return lab.output(1).locator("canvas[aria-label^='loss:']")


def prompt_of(lab):
    return lab.page.locator(".jp-Notebook .jp-Cell").nth(1).locator(".jp-InputPrompt")


def wait_for_file(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.1)


def test_a_page_that_was_closed_in_the_middle_has_everything(lab, server):
    path = server.add(new_notebook(cells=[new_code_cell(source) for source in CELLS]))
    lab.open(path)
    lab.start_ranks()
    lab.run_cell(1)
    expect(canvas_of(lab)).to_have_count(1, timeout=90_000)
    lab.wait_for(1, "in it")
    lab.page.wait_for_timeout(1500)

    # Opened in the middle: the panel, which goes on, and what was printed meanwhile.
    reopen(lab, path)
    expect(canvas_of(lab)).to_have_attribute(
        "aria-label", re.compile(r"at step [\d,]{3,}"), timeout=60_000
    )
    expect(lab.output(1).get_by_text("unseen")).to_be_visible(timeout=30_000)
    expect(prompt_of(lab)).to_have_text("[*]:")
    lab.picture_of(1, PICTURES / "reopened-1-running.png")
    (server.root / "soon").touch()
    expect(lab.output(1).get_by_text("seen, and more").first).to_be_visible(timeout=30_000)

    # Opened after the end, which nobody has seen.
    close(lab)
    (server.root / "enough").touch()
    wait_for_file(server.root / "over")
    reopen(lab, path)
    expect(lab.output(1).get_by_text("trained")).to_be_visible(timeout=60_000)
    expect(lab.output(1).locator(".ar-status")).to_contain_text("finished")
    canvas_of(lab).hover(position={"x": 200, "y": 80})
    expect(lab.output(1).locator(".ar-tip:visible")).to_contain_text("rank 1")
    lab.picture_of(1, PICTURES / "reopened-2-ended.png")
    expect(prompt_of(lab)).to_have_text("[2]:")
    saved = nbformat.read(lab.save(), as_version=4).cells[1]
    assert saved.execution_count == 2
    shown = [set(output.data) for output in saved.outputs]
    assert shown[:2] == [{"text/html", "text/plain"}, {"text/plain"}]
    assert "trained" in saved.outputs[1].data["text/plain"]

    # An error that nobody has seen is shown as well.
    lab.run_cell(2)
    lab.wait_for(2, "before")
    lab.page.wait_for_timeout(1500)
    close(lab)
    (server.root / "fail").touch()
    reopen(lab, path)
    expect(lab.output(2).get_by_text("ZeroDivisionError").first).to_be_visible(timeout=60_000)
    assert lab.outputs_text(2).startswith("ranks 0–1 │ before")
    lab.picture_of(2, PICTURES / "reopened-3-failed.png")
