"""Takes a screenshot of everything that allranks shows in JupyterLab and in Notebook 7.

python -m tests.browser.gallery [--app lab|notebook] [SCENE …] writes to test-results/gallery: each
scene in a light and a dark theme, 1366 and 1920 pixels wide. They are for looking, not for a
comparison.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, expect, sync_playwright

from tests.browser.chromium import MISSING, find_chromium
from tests.browser.lab import CHROMIUM_ARGS, Lab, Server

FOLDER = Path("test-results") / "gallery"
SIZES = ((1366, 768), (1920, 1080))
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
FIELD, SIDEBAR = ".jp-allranks-field:visible", ".jp-allranks-sidebar"

CELLS = {
    "output": "import numpy as np\nprint('my share:', np.arange(3) + 10 * rank)\n"
    "print('all of us:', allreduce(np.arange(3), op=Sum))\nrank ** 2",
    "figures": "%matplotlib inline\nimport matplotlib.pyplot as plt\n"
    "plt.figure(figsize=(4, 2.4))\nplt.plot(np.sin(np.linspace(0, 6 + rank, 100)))\nplt.show()",
    "variables": "import numpy as np\nsteps, rates = 100, {'lr': 0.1}\nseed = 7 + rank\n"
    "weights = np.ones(3) * rank\nbatch = np.ones((4 + rank, 2))\n"
    "if rank == 2: extra = 'only here'",
    "runs": "import os, time\nif rank == 2:\n    while not os.path.exists('go'): time.sleep(0.1)\n"
    "barrier()",
    "error": "data = [1, 2, 3]\nif rank == 1:\n    data[7]\nallreduce(np.ones(3))",
    "debug": "total = 0.0\nfor step in range(3):\n    x = allreduce(step + rank, op=Sum)\n"
    "    total += x\nprint(total)",
    "asks": "weights.s",
    "trains": "import os, time\nimport numpy as np\nprint('epoch 0')\nfor step in range(200):\n"
    "    time.sleep(0.01 + 0.02 * (rank == 2))\n    allreduce(np.ones(50_000), name='gradients')\n"
    "    log(step=step, loss=1 / (step + 1) + rank / 9)\n"
    "while not os.path.exists('enough'): time.sleep(0.1)",
}


class Gallery:
    """One notebook in one application."""

    def __init__(self, lab: Lab, app: str) -> None:
        self.lab, self.page, self.app = lab, lab.page, app
        self.scene = ""

    def cell(self, name: str) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(list(CELLS).index(name))

    def run(self, name: str, wait: bool = True) -> None:
        self.lab.run_cell(list(CELLS).index(name))
        if wait:
            self.lab.wait_idle()

    def shoot(self, shown: Callable[[], object] = lambda: None, name: str = "") -> None:
        """Takes all four pictures; ``shown`` opens again what a change of theme closes."""
        for theme, full_name in THEMES.items():
            self.lab.choose_theme(full_name)
            for width, height in SIZES:
                self.page.set_viewport_size({"width": width, "height": height})
                shown()
                self.page.wait_for_timeout(600)
                file = f"{self.scene}{name}-{self.app}-{theme}-{width}.png"
                self.lab.screenshot(FOLDER / file)
                self.page.keyboard.press("Escape")

    def look_at(self, name: str) -> None:
        self.cell(name).scroll_into_view_if_needed()

    def toolbar(self) -> None:
        self.shoot(lambda: self.page.locator(FIELD).click())
        self.page.locator(FIELD).click()
        self.page.get_by_role("menuitem", name="Start 4 ranks").click()
        expect(self.page.locator(FIELD)).to_contain_text("4 ranks ·", timeout=90_000)

    def sidebar(self) -> None:
        self.lab.command("allranks:show")
        expect(self.page.locator(SIDEBAR)).to_be_visible()
        self.shoot()
        (self.lab.server.root / "go").unlink(missing_ok=True)
        self.run("runs", wait=False)
        expect(self.page.locator(SIDEBAR)).to_contain_text("in barrier for rank")
        self.shoot(lambda: self.look_at("runs"), "_running")
        (self.lab.server.root / "go").touch()
        self.lab.wait_idle()

    def chooser(self) -> None:
        self.run("output")
        self.run("figures")
        for name in ("output", "figures"):
            # The buttons are there while the mouse is over the output.
            output = self.cell(name).locator(".jp-Cell-outputWrapper")
            views = output.get_by_label("View of the ranks' output")
            for view in ("tab per rank", "side by side", "all ranks"):
                views.get_by_role("button", name=view).click()
                self.shoot(
                    lambda output=output: output.hover(position={"x": 300, "y": 8}),
                    f"_{name}_{view.split()[0]}",
                )

    def variables(self) -> None:
        self.lab.command("allranks:show")
        self.run("variables")
        title = self.page.locator(SIDEBAR).get_by_text("Variables", exact=True)
        title.click()
        expect(
            self.page.locator(f"{SIDEBAR} .jp-allranks-variables tbody tr").first
        ).to_be_visible()
        self.shoot()
        title.click()

    def panel(self) -> None:
        (self.lab.server.root / "enough").unlink(missing_ok=True)
        self.run("trains", wait=False)
        curve = self.cell("trains").locator("canvas[aria-label^='loss:']")
        expect(curve).to_have_attribute("aria-label", re.compile("at step 199"), timeout=60_000)
        self.shoot(lambda: self.look_at("trains"), "_running")
        (self.lab.server.root / "enough").touch()
        self.lab.wait_idle()
        self.shoot(lambda: self.look_at("trains"))

    def error(self) -> None:
        self.run("error")
        self.shoot(lambda: self.look_at("error"))

    def completion(self) -> None:
        """Of a name that has another value on each rank, Tab and then Shift-Tab."""

        def ask(key: str, popup: str) -> None:
            self.look_at("asks")
            for _ in range(5):
                self.cell("asks").locator(".cm-content").click()
                self.page.keyboard.press("Control+End")
                self.page.keyboard.press(key)
                # On a busy machine JupyterLab does not wait for the answer.
                with suppress(AssertionError):
                    return expect(self.page.locator(popup)).to_be_visible()
            raise TimeoutError(popup)

        self.run("variables")
        self.shoot(lambda: ask("Tab", ".jp-Completer"), "_tab")
        self.lab.write(list(CELLS).index("asks"), "weights")
        self.shoot(lambda: ask("Shift+Tab", ".jp-Tooltip"), "_tooltip")

    def debugger(self) -> None:
        self.lab.command("allranks:show")
        self.page.locator(".jp-DebuggerBugButton").click()
        gutter = self.page.locator(".cm-breakpoint-gutter").first
        expect(gutter).to_be_attached(timeout=180_000)
        cell = self.cell("debug")
        cell.scroll_into_view_if_needed()
        cell.locator(".cm-breakpoint-gutter .cm-gutterElement").nth(3).click()
        self.run("debug", wait=False)
        listed = self.page.locator(f"{SIDEBAR} .jp-allranks-list li")
        expect(listed).to_have_count(4, timeout=60_000)
        listed.nth(2).get_by_role("button").click()
        self.lab.command("debugger:show-panel")
        self.shoot(lambda: self.look_at("debug"))
        # Without a debugger the cell goes on. After "continue" it could pause again: a breakpoint
        # that a click removes is still there for some milliseconds.
        self.page.locator(".jp-DebuggerBugButton").click()
        self.lab.wait_idle()

    def launcher(self) -> None:
        if self.app == "lab":
            self.lab.command("launcher:create")
            card = self.page.locator(".jp-LauncherCard", has_text="allranks (4 ranks)")
            expect(card).to_be_visible()
        self.shoot()


SCENES = [
    "toolbar",
    "sidebar",
    "chooser",
    "variables",
    "panel",
    "error",
    "completion",
    "debugger",
    "launcher",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--app", choices=("lab", "notebook"), action="append")
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=", ".join(SCENES))
    typed = parser.parse_args()
    if unknown := set(typed.scenes) - set(SCENES):
        parser.error(f"expected scenes of {', '.join(SCENES)}, found {', '.join(sorted(unknown))}")
    chromium = find_chromium()
    if chromium is None:
        sys.exit(MISSING)
    with (
        tempfile.TemporaryDirectory() as home,
        Server(Path(home)) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        for app in typed.app or ("lab", "notebook"):
            lab = Lab(browser.new_page(), server)
            cells = [new_code_cell(source) for source in CELLS.values()]
            # Each has a kernel of its own.
            path = server.add(new_notebook(cells=cells), f"in_{app}.ipynb")
            lab.open(path, tree="lab/tree" if app == "lab" else "notebooks")
            shown = Gallery(lab, app)
            for name in SCENES:
                # The others need what this one does.
                if not typed.scenes or name in typed.scenes or name == "toolbar":
                    shown.scene = name
                    getattr(shown, name)()
                    sys.stdout.write(f"{app} {name}\n")
            lab.close()
        browser.close()


if __name__ == "__main__":
    main()
