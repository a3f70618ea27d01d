"""The debugger of JupyterLab and Notebook 7 on eight ranks of two hosts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.conftest import PICTURES, fresh_page
from tests.browser.lab import Lab, Server
from tests.hosts.hosts import Hosts, require
from tests.kernel import spec_of

SOURCE = """%%distributed
total = 0.0
for step in range(10):
    x = allreduce(float(step + rank), op=Sum)
    total += x
    y = total
    z = 1000 + rank
print(total)"""
FRAMES = ".jp-DebuggerCallstack-body .jp-DebuggerCallstackFrame"
DEBUG_INFO = """async () => {
    const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    const asked = { type: "request", seq: 0, command: "debugInfo", arguments: {} };
    return (await kernel.requestDebug(asked).done).content.body;
}"""
#: On a slow machine ranks reach a line seconds apart; the steps here shall be those of all.
TOGETHER = """
from allranks.features.debugger import debug_session
debug_session._TOGETHER_SECONDS = 100.0
"""
#: In a multiple of five lines. With STEPS in both applications the test takes half a minute more.
STEPS, STEPS_NOTEBOOK_7 = 50, 10


@pytest.fixture
def lab(browser: BrowserContext) -> Iterator[Lab]:
    """A page whose kernel "h0" runs on the first of three hosts."""
    require()
    with Hosts(3) as hosts:
        home = hosts.shared / "jupyterlab"
        folder = home / "JUPYTER_DATA_DIR" / "kernels" / "h0"
        folder.mkdir(parents=True)
        command = hosts.command("h0", spec_of(sys.executable).argv, hosts.shared)
        spec = {"argv": command, "display_name": "h0", "language": "python"}
        (folder / "kernel.json").write_text(json.dumps(spec | {"metadata": {"debugger": True}}))
        # A port of the host cannot be reached from here.
        options = (
            "--KernelManager.transport=ipc",
            "--KernelSpecManager.ensure_native_kernel=False",
        )
        with Server(home, *options) as server, fresh_page(browser, server) as lab:
            yield lab
            lab.screenshot(PICTURES / "debugger.png")


def test_a_clicked_breakpoint_and_fifty_steps_of_eight_ranks_on_two_hosts(lab: Lab) -> None:
    start = f"%load_ext allranks\n{TOGETHER}\n%distributed start --on ssh:h1:4,h2:4"
    alive = "%%distributed\nint(allreduce(1, op=Sum))"
    cells = [new_code_cell(source) for source in (start, SOURCE, alive)]
    metadata = {"kernelspec": {"name": "h0", "display_name": "h0", "language": "python"}}
    path = lab.server.add(new_notebook(cells=cells, metadata=metadata))
    lab.open(path)
    lab.run_cell(0)
    lab.wait_for(0, "started ranks 0–7", timeout=240)
    lab.wait_idle()
    step_through(lab, STEPS, shown=0, chosen=5)
    lab.screenshot(PICTURES / "debugger_steps.png")
    # The other application, with the same kernel and ranks: the chosen rank is shown first.
    lab.command("notebook:clear-all-cell-outputs")
    lab.save()
    lab.open(path, tree="notebooks")
    step_through(lab, STEPS_NOTEBOOK_7, shown=5, chosen=2)


def start_debugger(page: Page) -> None:
    # JupyterLab drops a click that comes while it asks the kernel of a new page for its state. The
    # kernel answers many questions before the click's own only if there is none.
    while not page.evaluate(DEBUG_INFO)["isStarted"]:
        page.locator(".jp-DebuggerBugButton").click()
        for _ in range(100):
            if page.evaluate(DEBUG_INFO)["isStarted"]:
                return


def step_through(lab: Lab, steps: int, shown: int, chosen: int) -> None:
    """Debugs the second cell with the rank that is shown first, and then with the chosen one."""
    page = lab.page
    panel = page.locator(".jp-NotebookPanel")
    start_debugger(page)
    expect(panel).to_have_attribute("data-jp-debugger", "true", timeout=180_000)
    lab.command("debugger:show-panel")
    lab.command("allranks:show")

    cell = page.locator(".jp-Notebook .jp-Cell").nth(1)
    # The gutter's first element is a hidden one, which keeps its width.
    of_line_2 = cell.locator(".cm-breakpoint-gutter > .cm-gutterElement").nth(2)
    of_line_2.click()
    expect(of_line_2.locator(".cm-breakpoint-icon")).to_be_visible()
    # JupyterLab shows it at once, and has no order of it and a cell that is run next.
    while not any(one["breakpoints"] for one in page.evaluate(DEBUG_INFO)["breakpoints"]):
        pass
    lab.run_cell(1)
    frame = page.locator(FRAMES).first
    expect(frame).to_contain_text(f"rank {shown}: <module>")
    step = page.locator('[data-command="debugger:next"]').first
    line = page.locator(".jp-DebuggerEditor-highlight")
    expect(line).to_have_text("total = 0.0")
    expected = ["for step in range(10):", "    x = allreduce(float(step + rank), op=Sum)"]
    expected += ["    total += x", "    y = total", "    z = 1000 + rank"]
    for number in range(steps):
        step.click()
        expect(line).to_have_text(expected[number % len(expected)])
    last = f"step: {steps // 5 - 1}"
    expect(page.get_by_role("treeitem", name=last, exact=True)).to_be_attached()
    expect(page.get_by_role("treeitem", name=f"z: {1000 + shown}", exact=True)).to_be_attached()
    ranks = page.locator(".jp-allranks-sidebar .jp-allranks-list li")
    expect(ranks).to_have_text([re.compile(rf"^rank {rank}In\[\d+\]:7$") for rank in range(8)])
    ranks.nth(chosen).get_by_role("button").click()
    expect(frame).to_contain_text(f"rank {chosen}: <module>")
    expect(page.get_by_role("treeitem", name=f"z: {1000 + chosen}", exact=True)).to_be_attached()
    page.locator('[data-command="debugger:continue"]').first.click()
    lab.wait_for(1, "ranks 0–7 │ 640.0")
    lab.run_cell(2)
    lab.wait_for(2, "ranks 0–7 → 8")
    # Between two open side areas the toolbar has no room for this button, and hides it.
    page.locator(".jp-DebuggerBugButton").dispatch_event("click")
    expect(panel).not_to_have_attribute("data-jp-debugger", "true")
