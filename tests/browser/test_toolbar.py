"""The ranks in the toolbar, the sidebar and the launcher: no magic is typed."""

from __future__ import annotations

import json
import re

import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from playwright.sync_api import expect

from tests.browser import axe
from tests.browser.conftest import PICTURES

FIELD, SIDEBAR = ".jp-allranks-field", ".jp-allranks-sidebar"
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg"
    "=="
)
SOURCES = [
    "print('hello from', rank)",
    "import time\nwhile not open('go').read():\n    time.sleep(0.1)",
    "import os\nif rank == 1: os._exit(3)\nbarrier()",
    "print('still', rank)",
]

NET = """class Net:
    def forward(self, x):
        for layer in range(8):
            y = x + layer
            if layer == 3:
                breakpoint()
            x = y
        return x
net = Net()"""

#: How many pixels are between the mark and a number at the prompt of a marked cell.
ROOM_BESIDE_NUMBER = """number => {
    const prompt = document.querySelector(".jp-allranks-cell .jp-InputPrompt");
    const before = prompt.textContent;
    prompt.textContent = `[${number}]:`;
    const words = document.createRange();
    words.selectNodeContents(prompt);
    const mark = getComputedStyle(prompt, "::before");
    const edge = prompt.getBoundingClientRect().left + prompt.clientLeft;
    const room = words.getBoundingClientRect().left
        - (edge + parseFloat(mark.left) + parseFloat(mark.width));
    prompt.textContent = before;
    return room;
}"""


@pytest.fixture
def opened(lab):
    cells = [new_code_cell(source) for source in SOURCES]
    return lab.open(lab.server.add(new_notebook(cells=cells)))


def choose(lab, item):
    lab.page.locator(FIELD).click()
    lab.page.get_by_role("menuitem", name=item).click()


def test_from_the_toolbar_to_the_output_of_four_ranks(opened):
    lab, page = opened, opened.page
    (lab.server.root / "go").touch()
    expect(page.locator(FIELD)).to_have_text("no ranks")
    choose(lab, "Start 4 ranks")
    expect(page.locator(FIELD)).to_have_text("4 ranks · every cell")
    lab.run_cell(0)
    lab.wait_for(0, "hello from 3")

    # Its keys, Control+Shift+C, are those of Firefox' own tools.
    lab.command("apputils:activate-command-palette")
    expect(page.locator(".lm-CommandPalette-input:visible")).to_be_focused()
    page.keyboard.type("Show the ranks")
    page.get_by_role("menuitem", name="Show the ranks").click()
    sidebar = page.locator(SIDEBAR)
    ranks = sidebar.locator(".jp-allranks-rank")
    expect(ranks).to_have_count(4)
    expect(sidebar).to_contain_text("4 idle")
    lab.run_cell(1)
    expect(sidebar).to_contain_text("4 running")
    expect(sidebar).to_contain_text(re.compile(r"In\[2\]:[23] "))
    lab.screenshot(PICTURES / "toolbar_running.png")
    # The sidebar's state changes while the keyboard is in it, and a button is pressed.
    interrupt = sidebar.get_by_role("button", name="Interrupt")
    interrupt.focus()
    drawn = ranks.first.element_handle()
    (lab.server.root / "go").write_text("now")
    lab.wait_idle()
    expect(sidebar).to_contain_text("4 idle")
    assert drawn.evaluate("row => row.isConnected")
    assert axe.look(lab, "sidebar", SIDEBAR) == []

    lab.run_cell(2)
    lab.wait_for(2, "rank 1 ")
    lab.wait_idle()
    lab.run_cell(3)
    lab.wait_for(3, "still")
    expect(ranks).to_have_count(4)

    lab.write(3, "%%rank 0,2-3\nprint('chosen', size - rank)")
    lab.run_cell(3)
    lab.wait_for(3, "rank 3 │ chosen 1")
    expect(lab.output(3)).not_to_contain_text("rank 1")

    sidebar.get_by_text("Variables", exact=True).click()
    variables = (
        "x = [1, 2]; y = rank; import numpy as np; z = np.ones(rank + 1); w = np.ones(2) * rank"
    )
    lab.write(3, f"{variables}\nif rank == 2: only = 'here'")
    lab.run_cell(3)
    expected = [
        *("only", "'here'", "only on rank 2"),
        *("w", "ndarray float64 (2,)", "same shape, different values"),
        *("x", "[1, 2]", "same"),
        *("y", "int", "different"),
        *("z", "ndarray float64 (1,)", "different types or shapes"),
    ]
    expect(sidebar.locator(".jp-allranks-variables tbody td")).to_have_text(expected)
    lab.screenshot(PICTURES / "toolbar_variables.png")
    assert axe.look(lab, "variables", SIDEBAR) == []

    lab.write(3, "print('\\x1b[31mred\\x1b[0m')")
    lab.run_cell(3)
    lab.wait_idle()
    with page.context.expect_page() as opening:
        sidebar.get_by_role("button", name="rank 2").click()
    expect(opening.value.locator("pre")).to_contain_text("red")
    assert "\x1b" not in opening.value.locator("pre").inner_text()
    opening.value.close()

    # The same words as in the menu.
    every = sidebar.get_by_label("Every cell runs on the ranks")
    expect(every).to_be_checked()
    marked = page.locator(".jp-Notebook .jp-allranks-cell")
    expect(marked).to_have_count(len(SOURCES))
    every.click()
    expect(every).not_to_be_checked()
    expect(page.locator(FIELD)).to_have_text("4 ranks · %%distributed")
    # All ran on the ranks, also those without output, until one runs in the notebook.
    expect(marked).to_have_count(len(SOURCES))
    # Other ranks of the kernel do not take the place of the notebook's.
    other = "from allranks import Cluster\nwith Cluster(n=1): pass\n"
    lab.write(3, f"{other}'rank' in globals()")
    lab.run_cell(3)
    lab.wait_for(3, "False")
    expect(ranks).to_have_count(4)
    expect(marked).to_have_count(len(SOURCES) - 1)
    lab.write(3, "%%rank 1\n1")
    expect(marked).to_have_count(len(SOURCES))
    # The mark is beside the number, and not on it.
    wide = page.viewport_size
    for size in (wide, {"width": 700, "height": 900}):
        page.set_viewport_size(size)
        for number in ("1", "12", "123"):
            assert page.evaluate(ROOM_BESIDE_NUMBER, number) >= 1
    page.set_viewport_size(wide)
    sidebar.get_by_role("button", name="Stop").click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    expect(page.locator(FIELD)).to_have_text("no ranks")
    expect(sidebar).to_contain_text("The ranks are stopped.")
    expect(marked).to_have_count(len(SOURCES))
    assert lab.complaints == []


def test_what_cannot_start_is_said_and_a_restarted_kernel_has_no_ranks(opened):
    lab, page = opened, opened.page
    choose(lab, "Start ranks")
    page.locator(".jp-Dialog input").fill("-n 2 --on nowhere")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    expect(page.locator(".Toastify__toast")).to_contain_text("nowhere")
    choose(lab, "Start 2 ranks")
    expect(page.locator(FIELD)).to_have_text("2 ranks · every cell")
    # In place of ranks whose cell would not end.
    (lab.server.root / "go").touch()
    lab.run_cell(1)
    choose(lab, "Restart with 4 ranks")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    expect(page.locator(FIELD)).to_have_text("4 ranks · every cell")
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    expect(page.locator(FIELD)).to_have_text("no ranks")
    # A page that is loaded again finds the ranks of its kernel, also while a cell runs.
    choose(lab, "Start 2 ranks")
    expect(page.locator(FIELD)).to_have_text("2 ranks · every cell")
    lab.run_cell(1)
    lab.save()
    page.reload()
    expect(page.locator(FIELD)).to_have_text("2 ranks · every cell")


def test_a_kernel_that_does_not_answer_leaves_no_start_unfinished(opened):
    page = opened.page
    expect(page.locator(FIELD)).to_have_text("no ranks")  # the kernel's answer
    started = psutil.Process(opened.server.process.pid).children()
    (kernel,) = [one for one in started if "ipykernel_launcher" in one.cmdline()]
    kernel.suspend()
    try:
        page.clock.install()
        choose(opened, "Start 2 ranks")
        expect(page.locator(FIELD)).to_have_text("starting 2 ranks …")
        page.clock.run_for(25_000)
        expect(page.locator(FIELD)).to_have_text("no ranks")
        expect(page.locator(".Toastify__toast")).to_contain_text("has not answered for 20 s")
    finally:
        kernel.resume()


def test_the_notebook_of_the_launchers_card_runs_again_in_a_new_kernel(opened):
    lab, page = opened, opened.page
    lab.command("launcher:create")
    page.locator(".jp-LauncherCard", has_text="allranks (4 ranks)").click()
    field = page.locator(f"{FIELD}:visible")
    expect(field).to_have_text("starting 4 ranks …")
    expect(field).to_have_text("4 ranks · every cell")
    cells = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")
    expect(cells).to_have_count(2)
    expect(cells.nth(0)).to_contain_text("allranks started ranks 0–3")
    page.wait_for_function("() => jupyterapp.shell.currentWidget.content.activeCellIndex === 1")
    lab.command("notebook:run-cell")
    lines = "".join(f"rank {rank} │ hello from rank {rank} of 4\n" for rank in range(4))
    said = cells.nth(1).locator(".jp-OutputArea")
    expect(said).to_contain_text(lines.strip())
    assert lab.complaints == []
    lab.run_cell(0)
    expect(cells.nth(0)).to_contain_text("allranks already runs ranks 0–3")
    page.evaluate(
        """async () => {
            const { content, sessionContext } = jupyterapp.shell.currentWidget;
            await jupyterapp.commands.execute("notebook:clear-all-cell-outputs");
            await sessionContext.restartKernel();
            await jupyterapp.commands.execute("notebook:run-all-cells");
        }"""
    )
    expect(said).to_contain_text(lines.strip())


def test_start_changes_no_notebook_and_offers_to_write_its_first_cell(opened):
    lab, page = opened, opened.page
    cells = page.locator(".jp-Notebook .jp-Cell")
    choose(lab, "Start 2 ranks")
    expect(page.locator(FIELD)).to_have_text("2 ranks · every cell")
    expect(cells).to_have_count(len(SOURCES))
    page.locator(".Toastify__toast button", has_text="Write this as the first cell").click()
    expect(cells).to_have_count(len(SOURCES) + 1)
    expect(cells.first).to_contain_text("%distributed start -n 2")
    # It is offered once.
    page.locator(FIELD).click()
    item = page.get_by_role("menuitem", name="Write the start of the ranks as the first cell")
    expect(item).to_have_attribute("aria-disabled", "true")


def test_ranks_that_ended_with_their_kernel_are_offered_again(lab):
    page = lab.page
    sources = ["%%distributed -n 2\nprint('typed', rank)", "print('hello from', rank)"]
    lab.open(lab.server.add(new_notebook(cells=[new_code_cell(source) for source in sources])))
    toasts = page.locator(".Toastify__toast")
    lab.run_cell(0)
    expect(toasts.filter(has_text="Run first: %load_ext allranks")).to_have_count(1)
    choose(lab, "Start 2 ranks")
    expect(page.locator(FIELD)).to_have_text("2 ranks · every cell")
    expect(toasts.filter(has_text="Run first")).to_have_count(0)
    expect(toasts.filter(has_text="No cell of this notebook starts ranks")).to_have_count(1)

    def kill_kernel():
        name = page.evaluate(
            "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.id"
        )
        started = psutil.Process(lab.server.process.pid).children()
        (kernel,) = [one for one in started if name in " ".join(one.cmdline())]
        kernel.kill()
        page.locator(".jp-Dialog .jp-mod-accept").click()
        expect(page.locator(FIELD)).to_have_text("no ranks")
        lab.wait_idle()

    kill_kernel()
    lab.run_cell(1)
    again = toasts.filter(has_text="The ranks ended with the kernel.")
    start = "%load_ext allranks, %distributed start -n 2, %distributed on"
    expect(again).to_contain_text(f"Run first: {start}")
    expect(toasts).to_have_count(1)
    lab.screenshot(PICTURES / "toolbar_ranks_ended.png")
    again.get_by_role("button", name="Write this as the first cell").click()
    page.keyboard.press("Shift+Enter")
    lab.wait_for(0, "allranks started ranks 0–1")
    expect(page.locator(FIELD)).to_have_text("2 ranks · every cell")

    kill_kernel()
    lab.run_cell(2)
    expect(again).to_contain_text(f"Run first the cell that starts them: {start}")
    lab.screenshot(PICTURES / "toolbar_start_again.png")
    again.get_by_role("button", name="Run that cell").click()
    expect(page.locator(FIELD)).to_have_text("2 ranks · every cell")
    expect(again).to_have_count(0)
    page.wait_for_function("() => jupyterapp.shell.currentWidget.content.activeCellIndex === 2")
    page.keyboard.press("Shift+Enter")
    lab.wait_for(2, "hello from 1")

    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    lab.command("notebook:clear-all-cell-outputs")
    expect(lab.output(2)).not_to_contain_text("hello")
    lab.run_all()
    lab.wait_for(1, "typed 1")
    lab.wait_for(2, "hello from 1")


def test_the_settings_of_the_toolbar_hide_the_field(lab):
    settings = lab.server.home / "JUPYTERLAB_SETTINGS_DIR" / "@jupyterlab" / "notebook-extension"
    hidden = settings / "panel.jupyterlab-settings"
    hidden.write_text(json.dumps({"toolbar": [{"name": "allranks", "disabled": True}]}))
    try:
        lab.open(lab.server.add(new_notebook(cells=[new_code_cell("1")])))
        expect(lab.page.locator(".jp-NotebookPanel-toolbar")).to_contain_text("ipykernel")
        expect(lab.page.locator(FIELD)).to_have_count(0)
    finally:
        hidden.unlink()


def test_what_ranks_do_while_the_kernel_is_idle_is_interrupted_in_the_sidebar(opened):
    lab, page = opened, opened.page
    waits = "import time\nwhile True: time.sleep(0.01)"
    sources = ["%load_ext allranks.px\n%distributed start -n 2\nview = rc[:]"]
    sources += [f"%%px --noblock\n{waits}"]
    for at, source in enumerate(sources):
        lab.write(at, source)
    lab.run_cell(0)
    lab.wait_for(0, "started ranks")
    lab.command("allranks:show")
    sidebar = page.locator(SIDEBAR)
    interrupt = sidebar.get_by_role("button", name="Interrupt")
    expect(sidebar).to_contain_text("2 idle")
    expect(interrupt).to_have_count(0)
    lab.run_cell(1)
    lab.wait_idle()
    expect(sidebar).to_contain_text("2 running")
    lab.screenshot(PICTURES / "toolbar_busy_beside.png")
    interrupt.click()
    expect(sidebar).to_contain_text("2 idle")
    expect(interrupt).to_have_count(0)

    lab.write(2, "import time\nheld = view.apply_async(time.sleep, 600)")
    lab.run_cell(2)
    lab.wait_idle()
    expect(sidebar).to_contain_text("2 between two cells")
    interrupt.click()
    expect(sidebar).to_contain_text("2 idle")

    # No cell looks at the ranks meanwhile.
    lab.write(2, "pids = view.apply_sync(__import__('os').getpid)\nprint(*pids)")
    lab.run_cell(2)
    lab.wait_for(2, re.compile(r"\d+ \d+"))
    lab.wait_idle()
    psutil.Process(int(lab.output(2).inner_text().split()[1])).kill()
    expect(sidebar).to_contain_text("1 dead")
    expect(sidebar).to_contain_text("the next cell of the ranks replaces it")
    lab.screenshot(PICTURES / "toolbar_dead.png")
    lab.write(2, "print('any cell')")
    lab.run_cell(2)
    lab.wait_for(2, "rank 1 was replaced")
    expect(sidebar).to_contain_text("2 idle")


def test_notebook_7_has_the_field_and_the_sidebar_too(opened):
    lab, page = opened, opened.page
    name = page.evaluate("() => jupyterapp.shell.currentWidget.context.path")
    lab.close()
    page.goto(f"{lab.server.url}/notebooks/{name}?token={lab.server.token}")
    choose(lab, "Start 2 ranks")
    expect(page.locator(FIELD)).to_have_text("2 ranks · every cell")
    choose(lab, "Show the ranks")
    expect(page.locator(SIDEBAR).locator(".jp-allranks-rank")).to_have_count(2)


def test_in_notebook_7_a_click_chooses_the_rank_that_the_debugger_shows(lab):
    page = lab.page
    sources = [NET, "net.forward(100 * rank)"]
    cells = [new_code_cell(source) for source in sources]
    lab.open(lab.server.add(new_notebook(cells=cells)), tree="notebooks")
    choose(lab, "Start 2 ranks")
    expect(page.locator(FIELD)).to_have_text("2 ranks · every cell")
    choose(lab, "Show the ranks")
    lab.run_cell(0)
    lab.wait_idle()
    page.locator(".jp-DebuggerBugButton").click()
    expect(page.locator(".cm-breakpoint-gutter").first).to_be_attached(timeout=180_000)
    lab.run_cell(1)
    ranks = page.locator(f"{SIDEBAR} .jp-allranks-list li")
    expect(ranks).to_have_count(2)
    expect(ranks.nth(1)).to_contain_text("In[1]:7")
    frame = page.locator(".jp-DebuggerCallstack-body .jp-DebuggerCallstackFrame").first
    lab.command("debugger:show-panel")
    expect(frame).to_contain_text("rank 0: forward")
    ranks.nth(1).get_by_role("button").click()
    expect(frame).to_contain_text("rank 1: forward")
    expect(ranks.locator("[aria-pressed=true]")).to_contain_text("rank 1")
    expect(page.get_by_role("treeitem", name="y: 106", exact=True)).to_be_attached()
    lab.screenshot(PICTURES / "debugger_notebook_7.png")
    page.locator('[data-command="debugger:next"]').first.click()
    expect(ranks.nth(0)).to_contain_text("In[1]:3")
    expect(ranks.nth(1)).to_contain_text("In[1]:3")
    expect(page.get_by_role("treeitem", name="x: 106", exact=True)).to_be_attached()
    page.locator('[data-command="debugger:continue"]').first.click()
    lab.wait_for(1, "rank 1 → 128")
    expect(ranks).to_have_count(0)


def test_a_view_of_an_untrusted_notebook_runs_no_script(lab):
    page = lab.page
    script = "<b>seen</b><img src='nowhere' onerror='window.ran = true'>"
    data = {"text/html": script, "text/plain": "seen"}
    whose = {"allranks": {"ranks": [[0, 1]]}}
    outputs = [new_output("display_data", data, metadata=whose)]
    chosen = {"allranks": {"ranks": "side"}}
    cell = new_code_cell("1", outputs=outputs, metadata=chosen)
    lab.open_without_kernel(lab.server.add(new_notebook(cells=[cell])))
    expect(page.locator(".jp-allranks-grid b")).to_have_count(2)
    assert page.evaluate("() => window.ran") is None
    # A view ends with the outputs.
    lab.command("notebook:clear-all-cell-outputs")
    expect(page.locator(".jp-allranks-grid b")).to_have_count(0)


def test_an_output_is_read_by_rank_or_side_by_side_and_the_choice_stays(lab):
    page = lab.page
    sources = [
        "%load_ext allranks",
        "%%distributed -n 3\nfor i in range(2): print('line', i * rank)\nrank * 10",
        "%%distributed\nfrom IPython.display import Image, display\nimport base64\n"
        f"pixel = base64.b64decode('{PIXEL}')\ndisplay(Image(pixel)) if rank else print('none')",
        "print('of the notebook')",
        "%%distributed\nif rank == 1: 1 / 0\nprint('well')",
    ]
    lab.open(lab.server.add(new_notebook(cells=[new_code_cell(source) for source in sources])))
    lab.run_all()
    lab.wait_for(4, "ZeroDivisionError")
    lab.wait_idle()
    choosers = page.get_by_label("View of the ranks' output")
    expect(choosers).to_have_count(3)

    def within(index, what):
        return page.locator(".jp-Cell").nth(index).locator(what)

    def columns(index):
        return within(index, ".jp-allranks-grid > section")

    whole = ".jp-Cell-outputArea"

    def select(number, view):
        choosers.nth(number).get_by_role("button", name=view).click()

    # Figures stand side by side, unless another view is chosen.
    expect(columns(2)).to_have_count(3)
    select(0, "tab per rank")
    within(1, ".jp-allranks-tabs button").nth(2).click()
    expect(columns(1)).to_have_count(2)
    expect(columns(1).first).to_contain_text("allranks started ranks 0–2")
    expect(columns(1).last).to_have_text(re.compile(r"^line 0\s+line 2\s+20\s*$"))
    expect(within(1, ".jp-allranks-tabs [aria-pressed=true]")).to_have_text("rank 2")
    expect(within(1, ".jp-allranks-tabs [aria-pressed=true]")).to_be_focused()
    expect(within(1, whole)).to_be_hidden()
    select(1, "all ranks")
    expect(columns(2)).to_have_count(0)
    select(1, "side by side")
    expect(columns(2)).to_have_count(3)
    expect(columns(2).nth(0)).to_contain_text("none")
    expect(columns(2).locator("img")).to_have_count(2)
    select(2, "side by side")
    # The error of all ranks stands below.
    expect(columns(4).last).to_contain_text("ZeroDivisionError")
    lab.screenshot(PICTURES / "toolbar_side_by_side.png")
    select(2, "all ranks")
    expect(within(4, whole)).to_be_visible()
    lab.save()
    page.reload()
    expect(columns(1).last).to_contain_text("line 2")
    expect(choosers.nth(0).locator("[aria-pressed=true]")).to_have_attribute(
        "title", "tab per rank"
    )
    select(0, "all ranks")
    expect(within(1, whole)).to_contain_text("ranks 0–2 │ line 0")
    assert lab.complaints == []


@pytest.mark.parametrize("tree", ["lab/tree", "notebooks"])
def test_the_help_menu_opens_the_installed_pages(lab, tree):
    page = lab.page
    lab.open(lab.server.add(new_notebook(cells=[new_code_cell("1")])), tree=tree)
    page.get_by_role("menuitem", name="Help", exact=True).click()
    page.get_by_role("menuitem", name="allranks Documentation").click()
    shown = page.locator(".jp-allranks-help")
    expect(shown.locator("h1")).to_have_text("All pages")
    shown.get_by_role("link", name="Output", exact=True).click()
    expect(shown.locator("h1")).to_have_text("Output")
    # Out of the installed pages: no link.
    page.get_by_role("button", name="Back").click()
    expect(shown.locator("h1")).to_have_text("All pages")
    expect(shown.get_by_text("this page")).to_be_visible()
    expect(shown.get_by_role("link", name="this page")).to_have_count(0)
    shown.get_by_role("link", name="The live panel").click()
    pictures = shown.locator("img")
    expect(pictures.first).to_have_js_property("complete", True)
    assert pictures.first.evaluate("image => image.naturalWidth") > 0
    lab.screenshot(PICTURES / f"help_{tree.partition('/')[0]}.png")
    # Notebook 7 itself complains while it starts.
    assert not [one for one in lab.complaints if "allranks" in one]
