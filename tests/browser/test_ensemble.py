"""A sweep of 24 models that read digits, in a real JupyterLab: its table, curves and controls."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser.conftest import PICTURES

SWEEP = """%%ensemble lr=log:3e-3:3:6 seed=0:4 --metric accuracy -o runs
import time
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

p = forward(x[test])[1]
result = {{"accuracy": (p.argmax(axis=1) == y[test]).mean(), "p": p, "weights": [w1, w2]}}
"""
AFTER = """
import numpy as np
best = runs.best("accuracy")
print(len(runs.finished), best.metrics["accuracy"] > 0.9, best.result["weights"][0].shape)
print(runs.gather("p").shape, (runs.mean("p").argmax(axis=1) >= 0).all())
"""


@pytest.fixture
def sweep(lab, server):
    """Starts the sweep on four ranks and returns once it runs."""
    pytest.importorskip("sklearn", reason="scikit-learn is missing: pip install scikit-learn")

    def start(pause=0.02):
        sources = ["%load_ext allranks\n%distributed start -n 4", SWEEP.format(pause=pause), AFTER]
        lab.open(server.add(new_notebook(cells=[new_code_cell(source) for source in sources])))
        lab.run_cell(0)
        lab.wait_for(0, "allranks started", timeout=90)
        lab.wait_idle()
        lab.run_cell(1)
        table = lab.output(1).locator("table.ar-members tbody tr")
        expect(table).to_have_count(24, timeout=30_000)
        return table

    return start


def states(lab):
    return lab.page.evaluate(
        "() => [...document.querySelectorAll('table.ar-members tbody tr')]"
        ".map(row => row.dataset.state)"
    )


def wait_for_finished(lab, count, timeout=60):
    lab.page.wait_for_function(
        "count => document.querySelectorAll("
        "'table.ar-members tr[data-state=finished]').length >= count",
        arg=count,
        timeout=1000 * timeout,
    )


def picture_of(lab, what, name, theme="JupyterLab Light"):
    lab.page.evaluate(
        "theme => jupyterapp.commands.execute('apputils:change-theme', { theme })", theme
    )
    light = str(theme == "JupyterLab Light").lower()
    lab.page.wait_for_function(
        "light => document.body.dataset.jpThemeLight === light", arg=light, timeout=20_000
    )
    lab.page.wait_for_timeout(600)
    lab.output(1).locator(what).screenshot(path=PICTURES / name)


def test_a_sweep_of_24_digit_models_is_seen_while_it_runs_and_after_it(sweep, lab):
    table = sweep()
    wait_for_finished(lab, 6)
    now = states(lab)
    assert now.count("running") >= 1
    assert "waiting" in now
    status = lab.output(1).locator(".ar-status")
    expect(status).to_contain_text(re.compile(r"\d+ of 24 finished.*about .* left"))
    bar = lab.output(1).get_by_role("progressbar", name="members that have ended")
    expect(bar).to_have_attribute("aria-valuetext", re.compile(r"^\d+ of 24 ended$"))
    for metric in ("loss", "accuracy"):
        canvas = lab.output(1).locator(f"canvas[aria-label^='{metric}:']")
        expect(canvas).to_have_count(1)
        assert canvas.evaluate(
            "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v > 0)"
        )
    expect(lab.output(1).locator(".ar-tile").first).to_contain_text("member")
    picture_of(lab, ".ar-dashboard", "ensemble-light.png")

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
        timeout=10_000,
    )
    expect(lab.output(1).locator("tr.ar-best")).to_have_attribute("data-state", "finished")
    star = "★ the best of those that have finished: the highest accuracy"
    expect(lab.output(1).locator(".ar-star")).to_have_text(star)
    picture_of(lab, ".ar-dashboard", "ensemble-dark.png", "JupyterLab Dark")
    # By a parameter, as by every other column.
    lab.output(1).get_by_role("button", name="lr", exact=True).click()
    rates = lab.output(1).locator(".ar-members td[data-column=lr]").all_inner_texts()
    assert [float(rate) for rate in rates] == sorted(float(rate) for rate in rates)

    lab.wait_idle(180)
    assert lab.output(1).locator(".ar-dashboard").count() == 0
    assert lab.output(1).locator("img[src^='data:image/svg+xml']").count() == 2
    expect(lab.output(1).locator("tbody tr")).to_have_count(24)
    expect(lab.output(1)).to_contain_text("24 of 24 finished")
    expect(lab.output(1)).to_contain_text("★")
    lab.run_cell(2)
    lab.wait_idle()
    assert lab.outputs_text(2).splitlines() == ["24 True (64, 32)", "(24, 597, 10) True"]
    lab.page.set_viewport_size({"width": 1280, "height": 1600})
    picture_of(lab, ".allranks-still", "ensemble-still.png")
    assert lab.complaints == []

    saved = lab.save()
    (output,) = nbformat.read(saved, as_version=4).cells[1].outputs
    assert set(output.data) == {"text/html", "text/plain"}
    assert saved.stat().st_size < 300_000


def test_members_are_added_and_stopped_from_the_panel(sweep, lab):
    table = sweep(pause=0.1)
    table.nth(23).get_by_role("button", name="stop member 23").click()
    expect(table.nth(23)).to_have_attribute("data-state", "stopped", timeout=10_000)
    # It imports first, for a while: what it logs says that it runs.
    expect(table.nth(0).locator("td[data-column=metric]")).to_have_text(
        re.compile(r"\d"), timeout=60_000
    )
    table.nth(0).get_by_role("button", name="stop member 0").click()
    expect(table.nth(0)).to_have_attribute("data-state", "stopped", timeout=30_000)

    field = lab.output(1).get_by_role("textbox", name="values of members to add")
    field.fill("lr=0.3 seed=")
    lab.output(1).get_by_role("button", name="Add", exact=True).click()
    answer = lab.output(1).locator(".ar-answer")
    expect(answer).to_contain_text("seed= expected values", timeout=10_000)
    field.fill("lr=0.3 seed=7:9")
    field.press("Enter")
    expect(table).to_have_count(26, timeout=10_000)
    for name, value in (("lr", "0.3"), ("seed", "8")):
        expect(table.nth(25).locator(f"td[data-column={name}]")).to_have_text(value)
    expect(answer).to_have_text("added 2")

    wait_for_finished(lab, 2)
    lab.output(1).get_by_role("button", name="Stop all").click()
    lab.wait_idle(60)
    expect(lab.output(1)).to_contain_text(re.compile(r"\d+ of 26 finished, \d+ stopped"))
    assert "Error" not in lab.outputs_text(1)
    assert lab.complaints == []
