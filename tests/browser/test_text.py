"""Text in a real JupyterLab: a start says how far it is, long text scrolls, errors are read."""

from __future__ import annotations

import re

from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser import widths
from tests.browser.conftest import PICTURES

#: How high a cell's text may be, whatever is written, in pixels.
BOUNDED = 600
LONG = "extraordinarily " * 100
CELLS = [
    "%load_ext allranks\n%distributed start -n 2 --preload slow_to_import",
    "%%distributed\nimport time\nfor line in range(3000):\n"
    "    print(f'\\x1b[31mred\\x1b[0m {line} <{rank}>')\n"
    "    if line % 300 == 0: time.sleep(0.1)",
    f"%%distributed\nraise ValueError({LONG!r})",
    "%%distributed\nimport waits_in_import",
]
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


def test_a_start_has_a_bar_long_text_a_box_and_an_error_whole_words(lab, server):
    (server.root / "slow_to_import.py").write_text(WAITS.format("begun"))
    lab.open(server.add(new_notebook(cells=[new_code_cell(source) for source in CELLS])))
    lab.run_cell(0)
    lab.wait_for(0, "starting ranks: 0 of 2 up")
    lab.wait_for(0, ", importing slow_to_import")
    expect(lab.output(0).locator("meter")).to_have_count(1)
    lab.picture_of(0, PICTURES / "text-starting.png")
    (server.root / "begun").touch()
    lab.wait_for(0, "allranks started", timeout=90)
    lab.wait_idle()
    assert "starting ranks" not in lab.outputs_text(0)
    expect(lab.output(0).locator("meter")).to_have_count(0)
    lab.picture_of(0, PICTURES / "text-started.png")
    lab.run_cell(1)
    lab.wait_idle()
    box = lab.output(1).get_by_role("region", name=re.compile("text of [0-9,]+ lines"))
    expect(box).to_have_count(1)
    assert lab.output(1).bounding_box()["height"] < BOUNDED
    assert box.evaluate("box => box.scrollHeight") > 10 * BOUNDED
    # The newest lines are in sight, and colours are those of the text.
    assert box.inner_text().endswith("2999 <1>")
    assert box.evaluate(AT_END)
    assert box.locator("span[style*=color]").first.inner_text() == "red"
    lab.picture_of(1, PICTURES / "text-scroller.png")
    widths.check(lab, 1, "scroller", (box, 0.95))

    lab.run_cell(2)
    lab.wait_idle()
    error = lab.output(2).locator("pre").last
    assert "extraordinarily" in error.inner_text()
    assert error.evaluate(BROKEN) is None
    lab.picture_of(2, PICTURES / "text-error.png")

    (server.root / "waits_in_import.py").write_text(WAITS.format("imported"))
    lab.run_cell(3)
    lab.wait_for(3, "importing waits_in_import on ranks 0–1")
    bar = lab.output(3).locator("meter")
    expect(bar).to_be_visible()
    widths.check(lab, 3, "importing")
    (server.root / "imported").touch()
    lab.wait_idle()
    expect(bar).to_have_count(0)
    assert lab.outputs_text(3) == ""
    assert lab.complaints == []
