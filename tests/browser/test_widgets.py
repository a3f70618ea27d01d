"""Widgets, bars and debuggers of ranks in a real JupyterLab: drawn, moved, typed in, read back."""

from __future__ import annotations

from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser.conftest import PICTURES

CELLS = [
    "%load_ext allranks\n%distributed start -n 2",
    "%%distributed\nimport time\nfrom tqdm.auto import tqdm\n"
    "for i in tqdm(range(100), desc='train'):\n    if i == 40 + 20 * rank: break",
    "%%distributed\nimport ipywidgets as w\nslider = w.IntSlider(description=f'of {rank}')\n"
    "twice = w.Label('nothing yet')\n"
    "slider.observe(lambda change: setattr(twice, 'value', f'twice {2 * change.new}'), 'value')\n"
    "out = w.Output(layout={'border': '1px solid'})\nwith out: print('inside', rank)\n"
    "display(slider, twice, out)",
    "%%distributed\nslider.value",
    "%%distributed\nfrom rich.progress import track\nfrom tqdm.notebook import tqdm\n"
    "for i in track(range(20), 'rich'): time.sleep(0.01)\n"
    "for i in tqdm(range(20), desc='drawn'): pass",
    "%%distributed -r 1\nimport anywidget, traitlets\nclass Press(anywidget.AnyWidget):\n"
    "    _esm = '''export default { render({ model, el }) {\n"
    "        const button = document.createElement('button');\n"
    "        const said = () => button.textContent = model.get('said');\n"
    "        button.onclick = () => model.send('pressed');\n"
    "        model.on('change:said', said); said(); el.append(button); } }'''\n"
    "    said = traitlets.Unicode('press 1').tag(sync=True)\npress = Press()\n"
    "press.on_msg(lambda *_: setattr(press, 'said', f'pressed on rank {rank}'))\npress",
    "%%distributed\nif rank == 1: breakpoint()\nbarrier()\n'out of it'",
]


def moved_by(lab, rank, presses):
    """Moves the slider of a rank with the arrow key."""
    handle = lab.output(2).locator(".noUi-handle").nth(rank)
    handle.focus()
    for _ in range(presses):
        handle.press("ArrowRight")


def test_bars_sliders_outputs_and_debuggers_of_ranks_are_drawn_and_work(lab, server):
    path = server.add(new_notebook(cells=[new_code_cell(source) for source in CELLS]))
    lab.open(path)
    lab.run_cell(0)
    lab.wait_for(0, "allranks started", timeout=90)
    for index in range(1, 3):
        lab.run_cell(index)
        lab.wait_idle()
    expect(lab.output(1)).to_contain_text("slowest: 0, mean 50%")
    expect(lab.output(2).locator(".noUi-handle")).to_have_count(2, timeout=30_000)
    expect(lab.output(2).get_by_text("inside 1")).to_be_visible()
    moved_by(lab, 1, 3)
    # The rank has heard it, and its label tells.
    expect(lab.output(2).get_by_text("twice 6")).to_be_visible(timeout=30_000)
    lab.run_cell(3)
    lab.wait_idle()
    assert lab.outputs_text(3) == "rank 0 → 0\nrank 1 → 3"
    lab.run_cell(4)
    lab.wait_idle()
    # One of rich, and one of tqdm, for both ranks.
    expect(lab.output(4).get_by_text("100%")).to_have_count(2, timeout=30_000)
    lab.run_cell(5)
    lab.wait_idle()
    press = lab.output(5).get_by_role("button", name="press 1")
    press.click()
    expect(lab.output(5).get_by_role("button", name="pressed on rank 1")).to_be_visible()
    lab.screenshot(PICTURES / "widgets-of-ranks.png")
    a_debugger_asks_in_the_cells_own_field(lab, 6)
    assert lab.complaints == []
    # A page that is loaded anew has the sliders as they were moved, and they still work.
    lab.save()
    lab.open(path)
    expect(lab.output(2).locator(".noUi-handle")).to_have_count(2, timeout=30_000)
    moved_by(lab, 1, 2)
    expect(lab.output(2).get_by_text("twice 10")).to_be_visible(timeout=30_000)


def a_debugger_asks_in_the_cells_own_field(lab, index):
    lab.run_cell(index)
    # One that was answered stays for half a second more.
    field = lab.output(index).locator(
        ".jp-OutputArea-stdin-item:not(.jp-OutputArea-stdin-hiding) input"
    )
    for line, shown in (("p rank * 21 + 21", "42"), ("c", "out of it")):
        expect(field).to_have_count(1, timeout=30_000)
        field.fill(line)
        field.press("Enter")
        lab.wait_for(index, shown)
    lab.wait_idle()
    lab.screenshot(PICTURES / "debugger-of-a-rank.png")
    said = lab.outputs_text(index)
    assert said.index("p rank * 21 + 21") < said.index("│ 42") < said.index("→ 'out of it'")
