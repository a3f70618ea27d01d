"""Text, widgets and debuggers of ranks in a real JupyterLab, and the ranks of another notebook.

A page that is closed in the middle of a cell and opened again has all that it has missed.
"""

from __future__ import annotations

import re
import tempfile

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser import widths
from tests.browser.conftest import fresh_page
from tests.faults.notebook import Notebook
from tests.kernel import wait_until

#: How high a cell's text may be, whatever is written, in pixels.
BOUNDED = 600
LONG = "extraordinarily " * 100
CELLS = {
    "start": "%load_ext allranks\n%distributed start -n 2 --preload slow_to_import",
    "text": "%%distributed\nimport time\nfor line in range(3000):\n"
    "    print(f'\\x1b[31mred\\x1b[0m {line} <{rank}>')\n"
    "    if line % 300 == 0: time.sleep(0.1)",
    "error": f"%%distributed\nprint({LONG!r})\nraise ValueError({LONG!r})",
    "import": "%%distributed\nimport waits_in_import",
    "bar": "%%distributed\nimport time\nfrom tqdm.auto import tqdm\n"
    "for i in tqdm(range(100), desc='train'):\n    if i == 40 + 20 * rank: break",
    "slider": "%%distributed\nimport ipywidgets as w\n"
    "slider = w.IntSlider(description=f'of {rank}')\ntwice = w.Label('nothing yet')\n"
    "slider.observe(lambda change: setattr(twice, 'value', f'twice {2 * change.new}'), 'value')\n"
    "out = w.Output(layout={'border': '1px solid'})\nwith out: print('inside', rank)\n"
    "display(slider, twice, out)",
    "value": "%%distributed\nslider.value",
    "bars": "%%distributed\nfrom rich.progress import track\nfrom tqdm.notebook import tqdm\n"
    "for i in track(range(20), 'rich'): time.sleep(0.01)\n"
    "for i in tqdm(range(20), desc='drawn'): pass",
    "press": "%%distributed -r 1\nimport anywidget, traitlets\nclass Press(anywidget.AnyWidget):\n"
    "    _esm = '''export default { render({ model, el }) {\n"
    "        const button = document.createElement('button');\n"
    "        const said = () => button.textContent = model.get('said');\n"
    "        button.onclick = () => model.send('pressed');\n"
    "        model.on('change:said', said); said(); el.append(button); } }'''\n"
    "    said = traitlets.Unicode('press 1').tag(sync=True)\npress = Press()\n"
    "press.on_msg(lambda *_: setattr(press, 'said', f'pressed on rank {rank}'))\npress",
    "debugger": "%%distributed\nif rank == 1: breakpoint()\nbarrier()\n'out of it'",
    "unseen": """%%distributed
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
    "fails": "%%distributed\nimport os, time\nprint('before')\n"
    "while not os.path.exists('fail'): time.sleep(0.1)\n1 / 0",
    "stop": "%distributed stop",
    "watch": "",
    "mine": "%%distributed\nprint('mine', kept)",
    "picture": "%%distributed -n 8 --simulate --picture\n"
    "comm.sendrecv(rank, (rank + 1) % size, source=(rank - 1) % size)",
}
START, TEXT, ERROR, IMPORT, BAR, SLIDER, VALUE, BARS = range(8)
PRESS, DEBUGGER, UNSEEN, FAILS, STOP, WATCH, MINE, PICTURE = range(8, len(CELLS))
#: A module that is imported until there is a file of that name.
WAITS = "import os, time\nwhile not os.path.exists('{}'): time.sleep(0.1)\n"
#: What stands around a word of an element that begins on one line and ends on another.
BROKEN = r"""element => {
    const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), range = new Range();
    for (let node; (node = walk.nextNode());) {
        for (const { index, 0: word } of node.data.matchAll(/extraordinarily/g)) {
            range.setStart(node, index);
            range.setEnd(node, index + word.length);
            const seen = [...range.getClientRects()].filter(({ width }) => width > 1);
            if (new Set(seen.map(({ top }) => top)).size > 1)
                return node.data.slice(Math.max(0, index - 30), index + 30);
        }
    }
    return null;
}"""

AT_END = """box => {
    const [text, seen] = [box.firstElementChild, box].map(one => one.getBoundingClientRect());
    return Math.abs(text.bottom - seen.bottom) < 5;
}"""
TRAINS = (
    "import os, time\nprint('begun')\nstep = 0\n"
    "while not os.path.exists('go'):\n"
    "    step += 1\n    log(loss=1 / step + rank / 9)\n    time.sleep(0.05)\n"
    "print('over')"
)


@pytest.fixture(scope="module")
def lab(browser, server):
    """One page for all tests of this file; the first one looks at the start of its two ranks."""
    with fresh_page(browser, server) as lab:
        cells = [new_code_cell(source) for source in CELLS.values()]
        yield lab.open(server.add(new_notebook(cells=cells), "output.ipynb"))


@pytest.fixture
def _ranks(lab, server):
    """Loads allranks and starts the two ranks where the first test has not run."""
    if "allranks started" not in lab.outputs_text(START):
        (server.root / "slow_to_import.py").touch()
        lab.run_cell(START)
        lab.wait_for(START, "allranks started")
        lab.wait_idle()


def test_a_start_has_a_bar_long_text_a_box_and_an_error_whole_words(lab, server):
    (server.root / "slow_to_import.py").write_text(WAITS.format("begun"))
    lab.run_cell(START)
    lab.wait_for(START, "starting ranks: 0 of 2 up")
    lab.wait_for(START, ", importing slow_to_import")
    expect(lab.output(START).locator("meter")).to_have_count(1)
    (server.root / "begun").touch()
    lab.wait_for(START, "allranks started")
    lab.wait_idle()
    expect(lab.output(START)).not_to_contain_text("starting ranks")
    expect(lab.output(START).locator("meter")).to_have_count(0)
    lab.run_cell(TEXT)
    lab.wait_idle()
    box = lab.output(TEXT).get_by_role("region", name=re.compile("text of [0-9,]+ lines"))
    # The newest lines are in sight, and colours are those of the text.
    expect(box).to_have_text(re.compile("2999 <1>$"))
    assert lab.output(TEXT).bounding_box()["height"] < BOUNDED
    assert box.evaluate("box => box.scrollHeight") > 10 * BOUNDED
    assert box.evaluate(AT_END)
    assert box.locator("span[style*=color]").first.inner_text() == "red"
    widths.check(lab, TEXT, (box, 0.95))

    lab.run_cell(ERROR)
    lab.wait_idle()
    for part in ("first", "last"):  # what was printed, and the error
        text = getattr(lab.output(ERROR).locator("pre"), part)
        expect(text).to_contain_text("extraordinarily")
        assert text.evaluate(BROKEN) is None

    (server.root / "waits_in_import.py").write_text(WAITS.format("imported"))
    lab.run_cell(IMPORT)
    lab.wait_for(IMPORT, "importing waits_in_import on ranks 0–1")
    bar = lab.output(IMPORT).locator("meter")
    expect(bar).to_be_visible()
    widths.check(lab, IMPORT)
    (server.root / "imported").touch()
    lab.wait_idle()
    expect(bar).to_have_count(0)
    expect(lab.output(IMPORT)).to_have_text("", use_inner_text=True)
    assert lab.complaints == []


@pytest.mark.usefixtures("_ranks")
def test_a_picture_of_simulated_ranks_is_enlarged(lab):
    lab.run_cell(PICTURE)
    lab.wait_idle()
    picture = lab.output(PICTURE).locator(".allranks-picture svg")
    width = picture.bounding_box()["width"]
    lab.output(PICTURE).get_by_text("4×").click()
    wider = "([svg, width]) => svg.getBoundingClientRect().width > 3 * width"
    lab.page.wait_for_function(wider, arg=[picture.element_handle(), width])


def moved_by(lab, rank, presses):
    handle = lab.output(SLIDER).locator(".noUi-handle").nth(rank)
    handle.focus()
    for _ in range(presses):
        handle.press("ArrowRight")


@pytest.mark.usefixtures("_ranks")
def test_bars_sliders_outputs_and_debuggers_of_ranks_are_drawn_and_work(lab):
    for index in (BAR, SLIDER):
        lab.run_cell(index)
        lab.wait_idle()
    expect(lab.output(BAR)).to_contain_text("slowest: 0, mean 50%")
    expect(lab.output(SLIDER).locator(".noUi-handle")).to_have_count(2)
    expect(lab.output(SLIDER).get_by_text("inside 1")).to_be_visible()
    moved_by(lab, 1, 3)
    # The rank has heard it, and its label tells.
    expect(lab.output(SLIDER).get_by_text("twice 6")).to_be_visible()
    lab.run_cell(VALUE)
    expect(lab.output(VALUE)).to_have_text("rank 0 → 0\nrank 1 → 3", use_inner_text=True)
    lab.run_cell(BARS)
    lab.wait_idle()
    # One of rich, and one of tqdm, for both ranks.
    expect(lab.output(BARS).get_by_text("100%")).to_have_count(2)
    lab.run_cell(PRESS)
    lab.wait_idle()
    press = lab.output(PRESS).get_by_role("button", name="press 1")
    press.click()
    expect(lab.output(PRESS).get_by_role("button", name="pressed on rank 1")).to_be_visible()
    a_debugger_asks_in_the_cells_own_field(lab)
    assert lab.complaints == []
    # A page that is loaded anew has the sliders as they were moved, and they still work.
    lab.save()
    lab.open("output.ipynb")
    expect(lab.output(SLIDER).locator(".noUi-handle")).to_have_count(2)
    moved_by(lab, 1, 2)
    expect(lab.output(SLIDER).get_by_text("twice 10")).to_be_visible()


def a_debugger_asks_in_the_cells_own_field(lab):
    lab.run_cell(DEBUGGER)
    # One that was answered stays for half a second more.
    field = lab.output(DEBUGGER).locator(
        ".jp-OutputArea-stdin-item:not(.jp-OutputArea-stdin-hiding) input"
    )
    for line, shown in (("p rank * 21 + 21", "42"), ("c", "out of it")):
        expect(field).to_have_count(1)
        field.fill(line)
        field.press("Enter")
        lab.wait_for(DEBUGGER, shown)
    lab.wait_idle()
    expect(lab.output(DEBUGGER)).to_contain_text("→ 'out of it'")
    said = lab.outputs_text(DEBUGGER)
    assert said.index("p rank * 21 + 21") < said.index("│ 42") < said.index("→ 'out of it'")


def close(lab):
    closed, lab.page = lab.page, lab.page.context.new_page()
    closed.close()


def reopen(lab):
    close(lab)
    lab.page.goto(f"{lab.server.url}/lab/tree/output.ipynb?token={lab.server.token}")
    lab.page.locator(".jp-Notebook .jp-Cell").first.wait_for()


@pytest.mark.usefixtures("_ranks")
def test_a_page_that_was_closed_in_the_middle_has_everything(lab, server):
    def prompt():
        return lab.page.locator(".jp-InputPrompt").nth(UNSEEN)

    def canvas():
        return lab.output(UNSEEN).locator("canvas[aria-label^='loss:']")

    lab.run_cell(UNSEEN)
    expect(canvas()).to_have_count(1)
    lab.wait_for(UNSEEN, "in it")

    # Opened in the middle: the panel, which goes on, and what was printed meanwhile.
    reopen(lab)
    expect(canvas()).to_have_attribute("aria-label", re.compile(r"at step [\d,]{3,}"))
    expect(lab.output(UNSEEN).get_by_text("unseen")).to_be_visible()
    expect(prompt()).to_have_text("[*]:")
    (server.root / "soon").touch()
    expect(lab.output(UNSEEN).get_by_text("seen, and more").first).to_be_visible()

    # Opened after the end, which nobody has seen.
    close(lab)
    (server.root / "enough").touch()
    wait_until((server.root / "over").exists, seconds=60)
    reopen(lab)
    expect(lab.output(UNSEEN).get_by_text("trained")).to_be_visible()
    expect(lab.output(UNSEEN).locator(".ar-status")).to_contain_text("2 ranks ✓")
    canvas().hover(position={"x": 200, "y": 80})
    expect(lab.output(UNSEEN).locator(".ar-tip:visible")).to_contain_text("rank 1")
    expect(prompt()).to_have_text(re.compile(r"^\[\d+\]:$"))
    saved = nbformat.read(lab.save(), as_version=4).cells[UNSEEN]
    assert f"[{saved.execution_count}]:" == prompt().inner_text()
    shown = [set(output.data) for output in saved.outputs]
    assert shown[:2] == [{"text/html", "text/plain"}, {"text/plain"}]
    assert "trained" in saved.outputs[1].data["text/plain"]

    # An error that nobody has seen is shown as well.
    lab.run_cell(FAILS)
    lab.wait_for(FAILS, "before")
    # A page that is opened again asks for the outputs of cells that had run for long.
    lab.page.wait_for_timeout(1500)
    close(lab)
    (server.root / "fail").touch()
    reopen(lab)
    expect(lab.output(FAILS).get_by_text("ZeroDivisionError").first).to_be_visible()
    assert lab.outputs_text(FAILS).startswith("ranks 0–1 │ before")


@pytest.mark.usefixtures("_ranks")
def test_a_page_shows_what_another_notebook_runs_below_the_line_that_watches(lab, tmp_path):
    lab.run_cell(STOP)
    lab.wait_idle()
    # Where the server's kernels look for clusters, too.
    with Notebook(tmp_path, {"TMPDIR": tempfile.gettempdir()}) as other:
        other.on_ranks("kept = 10 * rank", "-n 2")
        name = re.findall(r"(\w{8})  .* attached to this notebook", _listed(other))[0]
        lab.replace(WATCH, f"%distributed attach {name}")
        lab.run_cell(WATCH)
        lab.wait_idle()
        cell = other.start_on_ranks(TRAINS)
        lab.wait_for(WATCH, "begun")
        shown = lab.output(WATCH)
        expect(shown.locator("canvas[aria-label^='loss:']")).to_be_visible()
        expect(shown.get_by_role("button", name="Interrupt")).to_be_hidden()
        (tmp_path / "go").touch()
        cell.wait()
        lab.wait_for(WATCH, "over")
        assert f"of the notebook of process {other.pid}, on ranks 0–1:" in lab.outputs_text(WATCH)
        lab.run_cell(MINE)
        lab.wait_for(MINE, "mine 10")
        assert ", watched by this notebook" in _listed(other)
        assert "are back" in other.on_ranks("kept").text
        # Else they would stay for the second one, and other tests' notebooks would find them.
        other.run("%distributed stop")


def _listed(notebook: Notebook) -> str:
    return notebook.run("%distributed clusters").text
