"""The explainer in a real JupyterLab: played, scrubbed, run again, and read without a kernel."""

from __future__ import annotations

import json
import re
import time
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from tests.browser import widths
from tests.browser.conftest import PICTURES, VIEWPORT, page_with_ranks

START = "%load_ext allranks\n%distributed start -n 4"
RING = "from allranks.widgets import ring\nring({})"
BUSY = (
    "%%distributed\nimport os, time\nprint('in')\nwhile not os.path.exists('seen'): time.sleep(0.1)"
)

#: Whether a piece has been seen at many places.
TRAVELS = """() => {
    window.seen ??= new Set();
    window.seen.add(document.querySelector(".ar-piece")?.getAttribute("transform"));
    return window.seen.size > 8;
}"""


@pytest.fixture(scope="module")
def lab(browser, server):
    """One page and four ranks for all tests of this file."""
    with page_with_ranks(browser, server, START, "", BUSY, "%distributed stop") as lab:
        yield lab


@pytest.fixture
def explained(lab, request):
    def start(arguments=""):
        lab.complaints.clear()
        lab.page.set_viewport_size(VIEWPORT)
        lab.page.emulate_media(reduced_motion="no-preference")
        lab.page.evaluate("() => { delete window.seen; }")
        lab.replace(1, RING.format(arguments))
        lab.run_cell(1)
        player = lab.output(1).locator(".ar-explainer")
        expect(player).to_have_count(1)
        lab.wait_idle()
        return player

    yield start
    lab.screenshot(PICTURES / f"{request.node.name}.png")


def held(player):
    rows = player.locator(".ar-columns tbody tr").all()
    return np.array([[int(text) for text in row.locator("td").all_inner_texts()] for row in rows]).T


def at_the_end(player, rounds):
    expect(player).to_have_attribute("data-round", str(rounds))
    expect(player).to_have_attribute("data-playing", "false")


@pytest.mark.parametrize(("algorithm", "rounds"), [("ring", 6), ("recursive doubling", 2)])
def test_it_is_played_to_its_end_and_is_numpys_sum(explained, lab, algorithm, rounds):
    arrays = np.random.default_rng(1).integers(-50, 50, (4, 6))
    player = explained(f"algorithm={algorithm!r}, values={arrays.tolist()}")
    assert held(player).tolist() == arrays.tolist()
    # At a higher speed a slow page draws too few pictures of it.
    player.get_by_label("speed").select_option("0.25")
    player.get_by_role("button", name="play (space)").click()
    lab.page.wait_for_function(TRAVELS)
    player.get_by_label("speed").select_option("4")
    at_the_end(player, rounds)
    parts = player.locator(".ar-circle [data-share]")
    assert parts.evaluate_all("all => all.map(one => one.dataset.share)") == ["1"] * parts.count()
    assert held(player).tolist() == [arrays.sum(axis=0).tolist()] * 4
    assert player.locator("td.ar-whole").count() == 4 * 6
    expect(player.locator(".ar-words")).to_contain_text("Complete: all ranks.")
    assert lab.complaints == []


def test_a_round_is_predicted_and_saved_as_a_picture_and_as_a_film(explained, lab):
    lab.page.set_viewport_size({"width": 1366, "height": 768})
    lab.page.emulate_media(reduced_motion="reduce")
    player = explained("size=4")
    circle = player.locator(".ar-circle")
    # As wide as the cell lets it be, beside the values.
    assert circle.bounding_box()["width"] > 0.4 * player.bounding_box()["width"]
    widths.check(lab, 1, (player, 0.95), (circle, 0.4))
    toggle = player.get_by_role("button", name=re.compile("predict the next round"))
    toggle.focus()
    lab.page.keyboard.press("Enter")
    expect(player.get_by_role("group", name="Predict round 1 of 6")).to_be_visible()
    rank, number = map(int, re.findall(r"\d+", player.locator(".ar-question").inner_text()))
    wrong = f"chunk {(rank - number + 2) % 4}"
    player.locator(".ar-answers").get_by_role("button", name=wrong, exact=True).focus()
    lab.page.keyboard.press("Enter")
    told = player.get_by_role("status").inner_text()
    assert re.match(r"No\. Rank (\d) sends chunk \1: .*its own number\. 0 of 1 right", told)
    expect(player.locator(".ar-wrong")).to_have_text(re.compile("^✗ chunk"))
    expect(player.locator(".ar-right")).to_have_text(re.compile("^✓ chunk"))
    for _ in range(2):
        lab.page.keyboard.press("Enter")  # the next question, whose first answer is then taken
    expect(player.get_by_role("status")).to_contain_text(
        "In reduce-scatter the received value is added:"
    )
    lab.page.keyboard.press("Enter")
    expect(player).to_have_attribute("data-round", "1")

    # A chunk can be clicked on the rank that is asked about.
    player.get_by_role("slider", name="round").fill("3")
    told = player.locator(".ar-question").inner_text()
    rank = int(re.findall(r"\d", told)[0])
    chunk = (rank - 3) % 4
    player.locator(f"[data-rank='{rank}'][data-chunk='{chunk}'] text").click()
    expect(player.get_by_role("status")).to_contain_text("now complete chunks go around. 1 of 3")
    for _ in range(2):
        lab.page.keyboard.press("Enter")
    said = "In allgather the received value is complete and replaces the old one:"
    expect(player.get_by_role("status")).to_contain_text(said)

    picture = saved(lab, player, "save SVG")
    drawn = ElementTree.fromstring(picture.read_text())
    text = " ".join(one.text or "" for one in drawn.iter() if one.tag.endswith("text"))
    assert "ring allreduce of 4 int64 over 4 ranks" in text
    assert "round 3 of 6: reduce-scatter" in text
    greens = []
    with Image.open(saved(lab, player, "save film")) as film:
        assert film.n_frames > 6
        assert film.info["duration"] > 0
        for at in range(film.n_frames):
            film.seek(at)  # each can be decoded
            green = np.asarray(film.convert("RGB")) == (0xB9, 0xE5, 0xD6)
            greens.append(green.all(axis=2).sum())
    # In the last one all ranks have everything.
    assert greens[-1] > 2 * greens[0] > 0
    assert lab.complaints == []


def saved(lab, player, name):
    with lab.page.expect_download() as found:
        player.get_by_role("button", name=re.compile(f"^{name}")).click()
    path = PICTURES / found.value.suggested_filename
    found.value.save_as(path)
    return path


def test_it_is_led_by_the_keyboard_scrubbed_back_and_there_again_on_a_new_page(explained, lab):
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

    # A page that is loaded anew has the player again.
    lab.save()
    lab.page.goto(lab.page.url.replace("reset&", "").replace("?reset", ""))
    expect(player).to_have_count(1)
    player.focus()
    lab.page.keyboard.press("End")
    assert held(player).tolist() == [[111, 222]] * 3


def test_another_choice_is_run_on_the_ranks_when_they_are_idle(explained, lab, server):
    player = explained()
    algorithm, ranks = player.get_by_label("algorithm"), player.get_by_label("ranks")
    title, cost = player.locator("b").first, player.locator(".ar-cost")
    before = cost.inner_text()
    algorithm.focus()
    algorithm.select_option("tree")
    expect(title).to_have_text("tree allreduce of 8 int64 over 4 ranks")
    expect(cost).to_contain_text(re.compile("measured: .*simulated: "))
    expect(cost).not_to_have_text(before)
    expect(algorithm).to_be_focused()
    lab.page.keyboard.press("Tab")
    lab.page.keyboard.press("ArrowDown")
    expect(title).to_have_text("tree allreduce of 8 int64 over 3 ranks")
    expect(ranks).to_be_focused()

    lab.run_cell(2)
    lab.wait_for(2, "in")
    player.get_by_label("values").fill("5")
    lab.page.keyboard.press("Tab")
    expect(player.get_by_role("alert")).to_contain_text("The ranks are running a cell")
    (server.root / "seen").touch()
    expect(title).to_have_text("tree allreduce of 5 int64 over 3 ranks")
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
    expect(cost).not_to_contain_text("Running on the ranks")
    expect(title).to_have_text("tree allreduce of 5 int64 over 3 ranks")

    # What they have run is played without them.
    lab.run_cell(3)
    lab.wait_for(3, "stopped")
    ranks.fill("2")
    lab.page.keyboard.press("Tab")
    expect(player.get_by_role("alert")).to_contain_text("no ranks are running")
    expect(player.get_by_role("alert")).to_contain_text("tree of 8 over 4 ranks")
    expect(cost).not_to_contain_text("Running on the ranks")
    ranks.fill("4")
    player.get_by_label("values").fill("8")
    lab.page.keyboard.press("Tab")
    expect(title).to_have_text("tree allreduce of 8 int64 over 4 ranks")
    expect(player.get_by_role("alert")).to_have_text("")
    player.focus()
    lab.page.keyboard.press("End")
    assert held(player).tolist() == [[1111 * number for number in range(1, 9)]] * 4
    assert lab.complaints == []
    lab.start_ranks()


def test_a_saved_notebook_shows_the_last_run_without_a_kernel(explained, lab):
    player = explained("ranks=2, size=2")
    player.get_by_label("algorithm").select_option("recursive doubling")
    title = "recursive doubling allreduce of 2 int64 over 2 ranks"
    expect(player.locator("b").first).to_have_text(title)
    deadline = time.monotonic() + 60
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
    expect(picture).to_be_visible()
    expect(picture).to_have_js_property("complete", True)
    assert picture.evaluate("image => image.naturalWidth") > 200
    assert title in lab.outputs_text(1)
    assert lab.output(1).locator(".ar-explainer").count() == 0
