"""A sweep of 24 models that read digits, in a real JupyterLab: its table, curves and controls."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser import axe, widths
from tests.browser.conftest import PICTURES, page_with_ranks

SWEEP = """%%ensemble lr=log:3e-3:3:6 seed=0:4 --metric accuracy -o runs
import os, time
import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.data))
x, y = digits.data[order] / 16, digits.target[order]
train, test = slice(0, 1200), slice(1200, None)

rng = np.random.default_rng(seed)
w1, w2 = rng.normal(0, 0.1, (64, 32)), rng.normal(0, 0.1, (32, 10))
one_hot = np.eye(10)[y]

def forward(inputs):
    hidden = np.tanh(inputs @ w1)
    scores = np.exp(hidden @ w2 - (hidden @ w2).max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)

for step in range(30):
    for batch in np.array_split(rng.permutation(1200), 12):
        hidden, p = forward(x[batch])
        slope = (p - one_hot[batch]) / len(batch)
        back = (slope @ w2.T) * (1 - hidden**2)
        w2 -= lr * hidden.T @ slope
        w1 -= lr * x[batch].T @ back
    _, p = forward(x[train])
    loss = -np.log(p[np.arange(1200), y[train]] + 1e-12).mean()
    log(step=step, loss=loss, accuracy=(forward(x[test])[1].argmax(axis=1) == y[test]).mean())
    time.sleep({pause})

# Four run and four wait, or the last one runs, until what is there then has been looked at.
while member >= 16 and not os.path.exists({half!r}) or member == 23 and not os.path.exists({go!r}):
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def page(browser, server):
    """One page and four ranks for all tests of this file."""
    start = "%load_ext allranks\n%distributed start -n 4"
    with page_with_ranks(browser, server, start, "") as lab:
        yield lab


@pytest.fixture
def lab(page, request):
    page.complaints.clear()
    yield page
    page.screenshot(PICTURES / f"{request.node.name}.png")


@pytest.fixture
def sweep(lab, server):
    pytest.importorskip("sklearn", reason="scikit-learn is missing: pip install scikit-learn")

    def start(pause=0.02, half=True):
        files = {name: server.root / name for name in ("half", "go")}
        for file in files.values():
            file.unlink(missing_ok=True)
        if not half:
            files["half"].touch()
        lab.replace(1, SWEEP.format(pause=pause, **{n: str(file) for n, file in files.items()}))
        lab.run_cell(1)
        table = lab.output(1).locator("table.ar-members tbody tr")
        expect(table).to_have_count(24)
        return table

    return start


def wait_for_states(lab, **counts):
    lab.page.wait_for_function(
        """counts => Object.entries(counts).every(([state, count]) => document.querySelectorAll(
            `table.ar-members tr[data-state=${state}]`).length >= count)""",
        arg=counts,
    )


def wait_for_sorted_rates(lab):
    lab.page.wait_for_function(
        """() => {
            const cells = [...document.querySelectorAll(".ar-members td[data-column=lr]")];
            const rates = cells.map(cell => parseFloat(cell.textContent));
            return rates.length === 24 && rates.every((rate, i) => !i || rate >= rates[i - 1]);
        }""",
    )


def told_apart_by_parameters(lab):
    """More than 16 members are grouped unasked; a line a member leads from parameters to metric."""
    out = lab.output(1)
    by = out.get_by_role("combobox", name="by", exact=True)
    canvas = out.locator("canvas[aria-label^='accuracy:']")
    legend = out.locator(".ar-panel-curves .ar-legend")
    expect(by).to_have_value("lr")
    expect(canvas).to_have_attribute("aria-label", re.compile(r"lr=0.003, 4 members: mean 0\.\d"))
    expect(legend).to_contain_text("lr=0.01194 (4)")
    by.select_option("seed")
    expect(canvas).to_have_attribute("aria-label", re.compile("^accuracy: seed=0, 6 members: mean"))
    expect(legend).to_contain_text("seed=3 (6)")
    # Without bands each member is a line in the colour of its value.
    out.get_by_label("mean and spread").uncheck()
    expect(legend).not_to_contain_text("mean between")
    expect(legend).to_contain_text("seed=3 (6)")
    by.select_option("lr")
    out.get_by_label("mean and spread").check()

    parallel = out.get_by_role(
        "img", name=re.compile("members from lr, seed to accuracy; the highest is")
    )
    expect(parallel).to_be_visible()
    line = parallel.locator("polyline[data-member='1']")
    expect(line).to_have_count(1)
    points = [tuple(map(float, point.split(","))) for point in line.get_attribute("points").split()]
    assert len(points) == 3
    # From the lowest of the rates, at the foot of its axis, to the second of four seeds.
    feet = parallel.locator("path").first.get_attribute("d")
    assert points[0][1] == pytest.approx(float(feet.partition("V")[2]))
    assert points[1][1] < points[0][1]
    colour = line.get_attribute("stroke")
    out.get_by_role("combobox", name="colour").select_option("seed")
    expect(line).not_to_have_attribute("stroke", colour)
    expect(out.locator(".ar-panel-parameters .ar-legend")).to_contain_text("seed=3")
    line.dispatch_event("click")
    choose = out.locator(".ar-choose").nth(1)
    expect(choose).to_have_attribute("aria-pressed", "true")
    choose.click()
    expect(choose).to_have_attribute("aria-pressed", "false")
    out.get_by_role("combobox", name="colour").select_option("")


def test_a_sweep_of_24_digit_models_is_seen_while_it_runs_and_after_it(sweep, lab, server):
    lab.page.set_viewport_size({"width": 1366, "height": 1400})
    table = sweep()
    wait_for_states(lab, finished=16, running=4, waiting=4)
    status = lab.output(1).locator(".ar-status")
    expect(status).to_contain_text(re.compile(r"\d+ of 24 finished.*about .* left"))
    bar = lab.output(1).get_by_role("progressbar", name="members that have ended")
    expect(bar).to_have_attribute("aria-valuetext", re.compile(r"^\d+ of 24 ended$"))
    (server.root / "half").touch()
    for metric in ("loss", "accuracy"):
        canvas = lab.output(1).locator(f"canvas[aria-label^='{metric}:']")
        expect(canvas).to_have_count(1)
        lab.wait_drawn(canvas)
    expect(lab.output(1).locator(".ar-tile").first).to_contain_text("member")
    told_apart_by_parameters(lab)
    widths.check(lab, 1, (lab.output(1).locator(".ar-dashboard"), 0.95))

    # A member that is chosen stands out in the curves.
    table.nth(2).locator(".ar-choose").click()
    expect(table.nth(2).locator(".ar-choose")).to_have_attribute("aria-pressed", "true")
    # Sorted by the metric, from the best down.
    for _ in range(2):
        lab.output(1).get_by_role("button", name="accuracy", exact=True).click()
    lab.page.wait_for_function(
        """() => {
            const cells = [...document.querySelectorAll(".ar-members td[data-column=metric]")];
            const said = cells.map(cell => parseFloat(cell.textContent)).filter(Number.isFinite);
            return said.length > 6 && said.every((value, i) => !i || value <= said[i - 1]);
        }""",
    )
    expect(lab.output(1).locator("tr.ar-best")).to_have_attribute("data-state", "finished")
    star = re.compile(r"^★ best: accuracy [\d.]+ at lr=[\d.]+, seed=\d \(member \d+\)$")
    expect(lab.output(1).locator(".ar-star")).to_have_text(star)
    # By a parameter, as by every other column.
    lab.output(1).get_by_role("button", name="lr", exact=True).click()
    wait_for_sorted_rates(lab)

    (server.root / "go").touch()
    lab.wait_idle(180)
    # It stays, sorted as it was; what has ended takes no more members, and none can be stopped.
    expect(lab.output(1).locator(".ar-dashboard")).to_have_count(1)
    expect(lab.output(1).locator("tbody tr")).to_have_count(24)
    wait_for_sorted_rates(lab)
    for name in ("Add", "Stop all", "stop member 0"):
        button = lab.output(1).get_by_role("button", name=name, exact=True)
        expect(button).to_have_count(0)
    expect(lab.output(1)).to_contain_text("24 of 24 finished")
    expect(lab.output(1)).to_contain_text("★")
    assert lab.complaints == []


def test_members_are_added_and_stopped_from_the_panel(sweep, lab):
    # Those that are stopped here would not end by themselves while this looks at them.
    # One of those that are added fails.
    table = sweep("0.02 if 0 < member < 20 else 3 / (seed != 7)", half=False)
    table.nth(23).get_by_role("button", name="stop member 23").click()
    expect(table.nth(23)).to_have_attribute("data-state", "stopped")
    # It imports first, for a while: what it logs says that it runs.
    expect(table.nth(0).locator("td[data-column=metric]")).to_have_text(re.compile(r"\d"))
    table.nth(0).get_by_role("button", name="stop member 0").click()
    expect(table.nth(0)).to_have_attribute("data-state", "stopped")

    field = lab.output(1).get_by_role("textbox", name="values of members to add")
    field.fill("lr=0.3 seed=")
    lab.output(1).get_by_role("button", name="Add", exact=True).click()
    answer = lab.output(1).locator(".ar-answer")
    expect(answer).to_contain_text("seed= expected values")
    field.fill("lr=0.3 seed=7:9")
    field.press("Enter")
    expect(table).to_have_count(26)
    for name, value in (("lr", "0.3"), ("seed", "8")):
        expect(table.nth(25).locator(f"td[data-column={name}]")).to_have_text(value)
    expect(answer).to_have_text("added 2")

    wait_for_states(lab, finished=2, failed=1, stopped=2)
    found = axe.look(lab, "ensemble-live")
    lab.output(1).get_by_role("button", name="Stop all").click()
    lab.wait_idle()
    expect(lab.output(1)).to_contain_text(re.compile(r"\d+ of 26 finished, \d+ stopped, 1 failed"))
    assert "KeyboardInterrupt" not in lab.outputs_text(1)
    assert lab.complaints == []
    found += axe.look(lab, "ensemble-after")
    assert "\n".join(found) == ""


THOUSAND = (
    "%%ensemble x=0:1000 --metric loss\nimport time\n"
    "for i in range(5): log(loss=(x * 7 + 1) % 1000 - i)\ntime.sleep(0.005)"
)
#: Notes how many rows of members the page has in each of its pictures.
FRAMES = """() => {
    window.rows = new Set();
    const look = () => {
        window.rows.add(document.querySelectorAll("table.ar-members tbody tr").length);
        requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
}"""


def test_a_thousand_members_are_paged_and_sorted_while_they_run_and_afterwards(lab):
    lab.replace(1, THOUSAND)
    lab.page.evaluate(FRAMES)
    lab.run_cell(1)
    lab.wait_idle()
    assert max(lab.page.evaluate("[...window.rows]")) == 100
    assert lab.complaints == []
    look_through_the_pages(lab, "rows 1–100 of 1,000")
    saved = lab.save()
    lab.close()
    lab.open_without_kernel(saved.name, trusted=True)
    kept = re.compile(r"^rows 1–100 of (1,000|\d+, the best of 1,000 members)$")
    look_through_the_pages(lab, kept)


def look_through_the_pages(lab, said):
    panel = lab.output(1).locator(".ar-panel-members")
    rows = panel.locator("tbody tr")
    expect(rows).to_have_count(100)
    expect(panel.get_by_role("status").last).to_have_text(said)
    # The lowest loss is that of member 857: 857 * 7 + 1 is 6000.
    panel.get_by_role("button", name="loss", exact=True).click()
    first = rows.first.locator("td[data-column=number]")
    expect(first).to_have_text("857")
    panel.get_by_role("button", name="next members").click()
    expect(rows.first.locator("td[data-column=metric]")).to_have_text("96")
    panel.get_by_role("button", name="member", exact=True).click()
    expect(panel.get_by_role("status").last).to_have_text(said)
