"""What a cell shows on a laptop's screen and on a large one: all of its width, and no more."""

from __future__ import annotations

from playwright.sync_api import Locator, TimeoutError, expect

from tests.browser.lab import Lab

SIZES = ((1366, 768), (1920, 1080))
#: What stands out of its cell to the right, or out of the page. What scrolls inside does not, but
#: for JupyterLab's own boxes, which would have the panel as a whole scroll.
RUNS_OVER = """area => {
    const edge = area.getBoundingClientRect().right + 1, over = [];
    const look = element => {
        if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(element).overflowX)
            && !element.matches("[class*='jp-']")) return;
        for (const child of element.children) {
            const { right, width } = child.getBoundingClientRect();
            if (width > 1 && right > edge)
                over.push(`${child.tagName}.${child.getAttribute("class")} by ${right - edge} px`);
            look(child);
        }
    };
    look(area);
    const page = document.scrollingElement;
    if (page.scrollWidth > page.clientWidth) over.push("the page");
    return over;
}"""
WITHIN = f"area => !({RUNS_OVER})(area).length"
#: Whether something fills the cell, once the page has been laid out anew.
FILLS = """([element, share]) => {
    const area = element.closest(".jp-OutputArea-output").getBoundingClientRect();
    return element.getBoundingClientRect().width >= share * area.width;
}"""


def check(lab: Lab, index: int, *parts: tuple[Locator, float]) -> None:
    """Looks at the output of a cell in both sizes; the page keeps the size that it had.

    Args:
        lab: the page.
        index: the cell.
        parts: what has to fill at least such a share of the output's width.
    """
    before = lab.page.viewport_size
    assert before is not None
    for width, height in SIZES:
        lab.page.set_viewport_size({"width": width, "height": height})
        lab.page.wait_for_function("width => innerWidth === width", arg=width)
        for part, share in parts:
            expect(part).to_be_visible()
            lab.page.wait_for_function(FILLS, arg=[part.element_handle(), share])
        area = lab.output(index)
        try:
            # What draws itself anew does so after the page.
            lab.page.wait_for_function(WITHIN, arg=area.element_handle())
        except TimeoutError:
            raise AssertionError(area.evaluate(RUNS_OVER)) from None
    lab.page.set_viewport_size(before)
