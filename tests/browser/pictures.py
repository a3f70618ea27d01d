"""Takes the docs' pictures anew: python -m tests.browser.pictures [NAME …]

One notebook in one JupyterLab has a cell for each picture, in both themes where the docs show both:
the cell above the picture on its page where that can be seen, or one that trains nothing, but logs
and waits as training does. What stays without scripts is taken at the end, from the saved notebook.
They go to docs/pictures, and ``tour.gif`` is the README's. NAMEs take some of them only.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image
from playwright.sync_api import Locator, expect, sync_playwright

from tests.browser.chromium import MISSING, find_chromium
from tests.browser.conftest import MOST_MS
from tests.browser.lab import CHROMIUM_ARGS, Lab, Server
from tests.browser.test_ensemble import SWEEP
from tests.notebook.pages import CELL

DOCS = Path("docs")
FOLDER = DOCS / "pictures"
#: As wide as a laptop's page, and higher than any picture.
VIEWPORT = {"width": 1366, "height": 1800}
_FRAMES, _FRAME_SECONDS, _LAST_SECONDS = 20, 0.6, 3.0
_COLOURS, _MOVING_COLOURS, _MOVING_NBYTES = 256, 64, 1_000_000
_THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}

START = "%distributed start -n {n}"
TRAINING = """%%distributed
import numpy as np, time
rng = np.random.default_rng(rank)
for step in range(1, 401):
    time.sleep(0.03 + 0.02 * (rank == 2))
    allreduce(rng.normal(size=250_000).astype("float32"), name="gradients")
    log(step=step, loss=np.exp(-step / 120) + 0.02 * rng.normal(), accuracy=1 - np.exp(-step / 90))
"""
FIRST = """%%distributed
import numpy as np

share = np.arange(3) + 10 * rank
print("my share:", share)
print("all of us:", allreduce(share, op=Sum))
"""
FAILS = """%%distributed
if rank == 1:
    raise RuntimeError("no data")
allreduce(np.ones(3))
"""
LOGS = """%%distributed --view full
import os, sys, time
for epoch in range(30):
    for batch in range(0, 500, 100):
        print(f"epoch {epoch} batch {batch}: loss {1 / (epoch + 1 + batch / 500):.4f}")
    print(f"{128 - rank} images read")
    if rank == 0:
        print(f"epoch {epoch}: learning rate is now {0.1 / (epoch + 1):.4f}", file=sys.stderr)
print("rank", rank, "has seen", 30 * 500, "batches")
while not os.path.exists("seen"): time.sleep(0.1)
"""
MANY = """%%distributed
import numpy as np, os, time
rng = np.random.default_rng(rank)
for step in range(1000):
    time.sleep(0.1 + 0.02 * rng.random())
    allreduce(rng.normal(size=1000), name="weights")
    log(step=step, loss=np.exp(-step / 20) * (1 + 0.05 * rng.normal()) + 0.01 * rank)
    if os.path.exists("seen"): break
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.browser.pictures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TAKE))
    names = parser.parse_args().names or list(TAKE)
    if unknown := set(names) - set(TAKE):
        parser.error(f"expected {', '.join(TAKE)}; found {', '.join(unknown)}")
    chromium = find_chromium()
    if chromium is None:
        sys.exit(MISSING)
    with tempfile.TemporaryDirectory() as home, _page(chromium, Path(home)) as lab:
        for name in names:
            TAKE[name](lab)
            sys.stdout.write(f"{name}\n")


def panel(lab: Lab) -> None:
    """The panel while its cell runs, in both themes."""
    shown = _begun(lab, "panel").locator(".ar-dashboard")
    shown.locator("canvas").first.wait_for()
    time.sleep(_FRAMES * _FRAME_SECONDS)
    for theme in ("dark", "light"):
        _choose_theme(lab, _THEMES[theme])
        shown.locator("canvas").first.hover(position={"x": 160, "y": 80})
        _take(shown, f"dashboard-{theme}")
    lab.page.mouse.move(2, 2)
    lab.wait_idle()


def tour(lab: Lab) -> None:
    """Three cells with their source: output of four ranks, the panel, an error."""
    frames: list[tuple[bytes, float]] = []
    _ended(lab, "first")
    frames.append((_whole(lab, "first").screenshot(), 2 * _LAST_SECONDS))
    shown = _begun(lab, "panel").locator(".ar-dashboard")
    shown.locator("canvas").first.wait_for()
    for _ in range(_FRAMES):
        frames.append((_whole(lab, "panel").screenshot(), _FRAME_SECONDS))
        time.sleep(_FRAME_SECONDS / 2)  # a screenshot takes about as long
    lab.wait_idle()
    frames.append((_whole(lab, "panel").screenshot(), _LAST_SECONDS))
    _ended(lab, "fails")
    frames.append((_whole(lab, "fails").screenshot(), 2 * _LAST_SECONDS))
    _write_moving(frames, FOLDER / "tour.gif")
    _write_card(lab, frames[-2][0])


def logs(lab: Lab) -> None:
    """The logs, searched while the cell runs."""
    shown = _begun(lab, "logs")
    expect(shown.locator(".ar-panel-logs .ar-said")).to_contain_text("lines")
    shown.get_by_role("searchbox").fill("epoch")
    expect(shown.locator("mark").first).to_be_visible()
    _both(lab, shown.locator(".ar-panel-logs"), "dashboard-logs")
    _seen(lab)


def ensemble(lab: Lab) -> None:
    """A sweep while it runs, and sorted with a member brought out before its last one has ended."""
    shown = _begun(lab, "ensemble")
    table = shown.locator("table.ar-members tbody tr")
    finished = shown.locator("table.ar-members tr[data-state=finished]")
    expect(finished.nth(15)).to_be_visible(timeout=120_000)
    _take(shown.locator(".ar-dashboard"), "ensemble-light")
    expect(finished).to_have_count(23, timeout=120_000)
    table.nth(2).locator(".ar-choose").click()
    for _ in range(2):
        shown.get_by_role("button", name="accuracy", exact=True).click()
    lab.page.mouse.move(2, 2)
    _choose_theme(lab, _THEMES["dark"])
    _take(shown.locator(".ar-dashboard"), "ensemble-dark")
    _choose_theme(lab, _THEMES["light"])
    _seen(lab)


def ring(lab: Lab) -> None:
    """An allreduce after its first round, with a question about the second."""
    lab.page.emulate_media(reduced_motion="reduce")
    player = _begun(lab, "ring").locator(".ar-explainer")
    player.get_by_role("button", name="predict the next round").click()
    player.get_by_role("slider", name="round").fill("1")
    expect(player.get_by_role("group", name="Predict round 2")).to_be_visible()
    _both(lab, player, "ring")
    lab.wait_idle()


def strips(lab: Lab) -> None:
    """Where the ranks' time went."""
    shown = _ended(lab, "strips")
    shown.get_by_role("button", name="Timeline", exact=True).click()
    shown.locator(".ar-strips canvas").wait_for()
    _take(shown.locator(".ar-panel-timeline"), "strips")


def profile(lab: Lab) -> None:
    """A flame graph."""
    _take(_ended(lab, "profile"), "profile")


def figures(lab: Lab) -> None:
    """What four ranks have drawn."""
    _ended(lab, "figures")
    grid = _whole(lab, "figures").locator(".jp-allranks-grid")
    expect(grid.locator("img")).to_have_count(4)
    _take(grid, "figures")


def many(lab: Lab) -> None:
    """Twenty ranks: short tiles, and one band."""
    for name in ("stop", "twenty"):
        _ended(lab, name)
    shown = _begun(lab, "many").locator(".ar-dashboard")
    lab.page.wait_for_function(
        """() => [...document.querySelectorAll("canvas[aria-label^='loss:']")].some(
            one => /at step [4-9][0-9]/.test(one.getAttribute("aria-label")))""",
        timeout=180_000,
    )
    _take(shown, "dashboard-many")
    _seen(lab)


def still(lab: Lab) -> None:
    """What three of them are where scripts are not run, in the saved notebook."""
    path = lab.save()
    saved = nbformat.read(path, as_version=4).cells
    lab.close()
    lab.open_without_kernel(path.name)
    for cell, name in (("panel", "dashboard"), ("ensemble", "ensemble"), ("ring", "ring")):
        if saved[list(CELLS).index(cell)].outputs:  # it has been run
            # In another view of the ranks' output, it is there a second time.
            shown = _whole(lab, cell).locator(".jp-RenderedHTMLCommon").filter(visible=True).first
            shown.locator("img").first.wait_for()
            _take(shown, f"{name}-still")


TAKE: dict[str, Callable[[Lab], None]] = {
    take.__name__: take
    for take in (tour, panel, logs, ensemble, ring, strips, profile, figures, many, still)
}


def _above(page: str, picture: str) -> str:
    """Returns the cell that stands last above a picture on a page of the docs."""
    text, found, _ = (DOCS / page).read_text().partition(f"(pictures/{picture})")
    if not found:
        raise ValueError(f"expected {picture} on {page}, found no such picture")
    return [cell["source"] for cell in CELL.finditer(text)][-1]


CELLS = {
    "load": "%load_ext allranks\n" + START.format(n=4),
    "first": FIRST,
    "panel": TRAINING,
    "fails": FAILS,
    "logs": LOGS,
    "ensemble": SWEEP.format(pause=0.02, half=".", go="seen"),
    "ring": _above("dashboard.md", "ring-light.png"),
    "strips": _above("slow.md", "strips.png"),
    "profile": _above("slow.md", "profile.png"),
    "figures": _above("output.md", "figures.png"),
    "stop": "%distributed stop",
    "twenty": START.format(n=20),
    "many": MANY,
}


def _output(lab: Lab, name: str) -> Locator:
    return lab.output(list(CELLS).index(name))


def _whole(lab: Lab, name: str) -> Locator:
    """The cell with its source."""
    return lab.page.locator(".jp-Notebook .jp-Cell").nth(list(CELLS).index(name))


def _begun(lab: Lab, name: str) -> Locator:
    """Starts a cell and returns its output."""
    (lab.server.root / "seen").unlink(missing_ok=True)
    lab.run_cell(list(CELLS).index(name))
    return _output(lab, name)


def _ended(lab: Lab, name: str) -> Locator:
    """Runs a cell and returns its output."""
    shown = _begun(lab, name)
    lab.wait_idle()
    return shown


def _seen(lab: Lab) -> None:
    """Lets the cell end that waits for that."""
    (lab.server.root / "seen").touch()
    lab.wait_idle()


def _take(what: Locator, name: str) -> None:
    image = _image(what.screenshot()).quantize(_COLOURS, dither=Image.Dither.NONE)
    image.save(FOLDER / f"{name}.png", optimize=True)


def _image(shot: bytes) -> Image.Image:
    return Image.open(io.BytesIO(shot)).convert("RGB")


def _write_moving(shots: list[tuple[bytes, float]], path: Path) -> None:
    """Writes a GIF of pictures, each with its seconds; the last but one has all colours."""
    opened = [_image(shot) for shot, _ in shots]
    tall, wide = max(image.height for image in opened), opened[0].width
    # One palette for all, and no dithering: what has not changed is not written again.
    palette = opened[-2].quantize(_MOVING_COLOURS, dither=Image.Dither.NONE)
    frames = []
    for image in opened:
        page = Image.new("RGB", (wide, tall), "white")
        page.paste(image)
        frames.append(page.quantize(palette=palette, dither=Image.Dither.NONE))
    durations = [int(1000 * seconds) for _, seconds in shots]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0)
    if (nbytes := path.stat().st_size) > _MOVING_NBYTES:
        raise ValueError(f"expected at most {_MOVING_NBYTES:,} bytes, found {nbytes:,}: {path}")


def _write_card(lab: Lab, shot: bytes) -> None:
    """Writes the picture that other sites show beside a link to the documentation."""
    browser = lab.page.context.browser
    assert browser is not None
    page = browser.new_page(viewport={"width": 1200, "height": 630})
    page.set_content(
        f"""<body style="margin: 0; background: #00796b; font-family: sans-serif">
        <h1 style="margin: 24px 48px; color: white; font-size: 44px; font-weight: 500">
        allranks: a notebook cell on every rank of an MPI cluster</h1>
        <img style="margin-left: 160px; width: 880px; border-radius: 8px"
        src="data:image/png;base64,{base64.b64encode(shot).decode()}"></body>"""
    )
    image = _image(page.screenshot()).quantize(_COLOURS, dither=Image.Dither.NONE)
    image.save(FOLDER / "card.png", optimize=True)
    page.close()


def _both(lab: Lab, what: Locator, name: str) -> None:
    for theme in ("dark", "light"):
        _choose_theme(lab, _THEMES[theme])
        _take(what, f"{name}-{theme}")


@contextmanager
def _page(chromium: str, home: Path) -> Iterator[Lab]:
    with Server(home / "lab") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        page = browser.new_page(viewport=VIEWPORT)
        page.set_default_timeout(MOST_MS)
        notebook = new_notebook(cells=[new_code_cell(source.rstrip()) for source in CELLS.values()])
        lab = Lab(page, server).open(server.add(notebook))
        try:
            _ended(lab, "load")
            yield lab
        finally:
            lab.close()
            browser.close()


def _choose_theme(lab: Lab, theme: str) -> None:
    lab.choose_theme(theme)
    time.sleep(1)  # the change of colours has come to its end


if __name__ == "__main__":
    main()
