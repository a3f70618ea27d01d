"""The explainer in a real JupyterLab: played, scrubbed, run again, and read without a kernel."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser.conftest import PICTURES

START = "%load_ext allranks\n%distributed start -n 4"
RING = "from allranks.widgets import ring\nring({})"
BUSY = "%%distributed\nimport time\nprint('in'); time.sleep(5)"


@pytest.fixture
def explained(lab, server):
    """Shows an explainer on four ranks and returns its player."""

    def start(arguments="", *more):
        sources = [START, RING.format(arguments), *more]
        lab.open(server.add(new_notebook(cells=[new_code_cell(source) for source in sources])))
        lab.run_cell(0)
        lab.wait_for(0, "allranks started", timeout=90)
        lab.wait_idle()
        lab.run_cell(1)
        player = lab.output(1).locator(".ar-explainer")
        expect(player).to_have_count(1, timeout=60_000)
        lab.wait_idle()
        return player

    return start


def held(player):
    """What every rank holds, as it stands on the stage."""
    rows = player.locator(".ar-columns tbody tr").all()
    return np.array([[int(text) for text in row.locator("td").all_inner_texts()] for row in rows]).T


def at_the_end(player, rounds):
    expect(player).to_have_attribute("data-round", str(rounds), timeout=60_000)
    expect(player).to_have_attribute("data-playing", "false", timeout=10_000)


@pytest.mark.parametrize(
    ("algorithm", "rounds"), [("ring", 6), ("recursive doubling", 2), ("tree", 6)]
)
def test_it_is_played_to_its_end_and_is_numpys_sum(explained, lab, algorithm, rounds):
    arrays = np.random.default_rng(1).integers(-50, 50, (4, 6))
    player = explained(f"algorithm={algorithm!r}, values={arrays.tolist()}")
    assert held(player).tolist() == arrays.tolist()
    player.get_by_role("button", name="play (space)").click()
    expect(player.locator(".ar-air span").first).to_be_attached()
    at_the_end(player, rounds)
    assert held(player).tolist() == [arrays.sum(axis=0).tolist()] * 4
    assert player.locator("td.ar-whole").count() == 4 * 6
    expect(player.locator(".ar-words")).to_contain_text("Complete: all ranks.")
    lab.picture_of(1, PICTURES / f"explainer-{algorithm}.png")
    assert lab.complaints == []


def test_it_is_led_by_the_keyboard_and_scrubbed_back(explained, lab):
    player = explained("values=[[1, 2], [10, 20], [100, 200]]")
    start = held(player)
    player.focus()
    lab.page.keyboard.press("ArrowRight")
    expect(player).to_have_attribute("data-round", "1")
    words = player.locator(".ar-words")
    expect(words).to_contain_text("rank 1 sends chunk 1 (element 0) to rank 2: 100 + 10 = 110")
    lab.page.keyboard.press("ArrowRight")
    expect(player).to_have_attribute("data-round", "2")
    lab.page.keyboard.press("ArrowLeft")
    expect(player.locator("td.ar-added")).to_have_count(2)
    assert held(player).tolist() == [[1, 202], [10, 20], [110, 200]]

    lab.page.keyboard.press("Space")
    expect(player).to_have_attribute("data-playing", "true")
    lab.page.keyboard.press("Space")
    expect(player).to_have_attribute("data-playing", "false")
    lab.page.keyboard.press("End")
    assert held(player).tolist() == [[111, 222]] * 3

    scrub = player.get_by_role("slider", name="round")
    scrub.fill("1")
    expect(scrub).to_have_attribute("aria-valuetext", "round 1 of 4: reduce-scatter")
    assert held(player).tolist() == [[1, 202], [10, 20], [110, 200]]
    scrub.fill("0")
    assert held(player).tolist() == start.tolist()
    assert lab.complaints == []


def test_another_choice_is_run_on_the_ranks_when_they_are_idle(explained, lab):
    player = explained("", BUSY, "%distributed stop")
    algorithm, ranks = player.get_by_label("algorithm"), player.get_by_label("ranks")
    title, cost = player.locator("b").first, player.locator(".ar-cost")
    before = cost.inner_text()
    algorithm.focus()
    algorithm.select_option("tree")
    expect(title).to_have_text("tree allreduce of 8 int64 over 4 ranks", timeout=30_000)
    expect(cost).to_contain_text(re.compile("measured: .*simulated: "))
    assert cost.inner_text() != before
    expect(algorithm).to_be_focused()
    lab.page.keyboard.press("Tab")
    lab.page.keyboard.press("ArrowDown")
    expect(title).to_have_text("tree allreduce of 8 int64 over 3 ranks", timeout=30_000)
    expect(ranks).to_be_focused()

    lab.run_cell(2)
    lab.wait_for(2, "in")
    player.get_by_label("values").fill("5")
    lab.page.keyboard.press("Tab")
    expect(player.get_by_role("alert")).to_contain_text("The ranks are running a cell")
    expect(title).to_have_text("tree allreduce of 5 int64 over 3 ranks", timeout=30_000)
    expect(player.get_by_role("alert")).to_have_text("")
    player.focus()
    lab.page.keyboard.press("End")
    assert held(player).tolist() == [[111, 222, 333, 444, 555]] * 3

    # Too many are refused beside the field, and nothing says that the ranks run it.
    ranks.fill("9")
    lab.page.keyboard.press("Tab")
    expect(player.locator(".ar-head").get_by_role("alert")).to_have_text(
        "Expected 2 to 4 ranks, found 9."
    )
    expect(cost).not_to_contain_text("The ranks run it")
    expect(title).to_have_text("tree allreduce of 5 int64 over 3 ranks")
    lab.picture_of(1, PICTURES / "explainer-refused.png")

    # What they have run is played without them.
    lab.run_cell(3)
    lab.wait_for(3, "stopped")
    ranks.fill("2")
    lab.page.keyboard.press("Tab")
    expect(player.get_by_role("alert")).to_contain_text("no ranks are running", timeout=30_000)
    expect(player.get_by_role("alert")).to_contain_text("tree of 8 over 4 ranks")
    expect(cost).not_to_contain_text("The ranks run it")
    ranks.fill("4")
    player.get_by_label("values").fill("8")
    lab.page.keyboard.press("Tab")
    expect(title).to_have_text("tree allreduce of 8 int64 over 4 ranks", timeout=30_000)
    expect(player.get_by_role("alert")).to_have_text("")
    player.focus()
    lab.page.keyboard.press("End")
    assert held(player).tolist() == [[1111 * number for number in range(1, 9)]] * 4
    assert lab.complaints == []


def test_a_saved_notebook_shows_the_last_run_without_a_kernel(explained, lab):
    player = explained("ranks=2, size=2")
    player.get_by_label("algorithm").select_option("recursive doubling")
    title = "recursive doubling allreduce of 2 int64 over 2 ranks"
    expect(player.locator("b").first).to_have_text(title, timeout=30_000)
    deadline = time.monotonic() + 30
    while True:  # the picture comes behind what the player shows
        path = lab.save()
        (output,) = json.loads(path.read_text())["cells"][1]["outputs"]
        if title in "".join(output["data"]["text/plain"]) or time.monotonic() > deadline:
            break
    assert set(output["data"]) == {"text/html", "text/plain"}
    assert path.stat().st_size < 60_000

    lab.close()
    lab.open_without_kernel(path.name)
    picture = lab.output(1).locator("img[src^='data:image/svg+xml']")
    expect(picture).to_be_visible(timeout=30_000)
    assert picture.evaluate("image => image.complete && image.naturalWidth") > 200
    assert title in lab.outputs_text(1)
    assert lab.output(1).locator(".ar-explainer").count() == 0
    lab.picture_of(1, PICTURES / "explainer-reopened.png")


def test_a_page_that_is_loaded_anew_has_the_player_again(explained, lab):
    player = explained("ranks=2, size=2")
    lab.save()
    lab.page.goto(lab.page.url.replace("reset&", "").replace("?reset", ""))
    expect(player).to_have_count(1, timeout=60_000)
    player.focus()
    lab.page.keyboard.press("End")
    assert held(player).tolist() == [[11, 22]] * 2
