"""JupyterLab in a headless Chromium, as a reader sees it.

``Server`` is one JupyterLab for the whole run; ``Lab`` is one page of it with one notebook open.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from playwright.sync_api import Locator, Page

from tests import servers

SETTINGS = {
    # The question whether to fetch news covers the page.
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # Cells out of sight would not be in the page at all.
    "notebook-extension/tracker": {"windowingMode": "none"},
}

#: No look at each extension whether JupyterLab has to be built again.
PAGE_CONFIG = {"buildCheck": False}

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}

_EXPOSED = (
    "--LabApp.expose_app_in_browser=True",
    "--JupyterNotebookApp.expose_app_in_browser=True",
)

CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Server(servers.Server):
    """A JupyterLab; notebooks are served from ``home / "notebooks"``."""

    def __init__(self, home: Path, *options: str) -> None:
        for name, values in SETTINGS.items():
            path = home / "JUPYTERLAB_SETTINGS_DIR" / "@jupyterlab"
            path = path / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        config = home / "JUPYTER_CONFIG_DIR" / "labconfig" / "page_config.json"
        config.parent.mkdir(parents=True)
        config.write_text(json.dumps(PAGE_CONFIG))
        super().__init__("jupyterlab", home, *_EXPOSED, *options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def clear(self) -> None:
        """Removes what earlier tests have left: cells of later ones wait for some such files."""
        for path in self.root.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def add(self, notebook: Path | Mapping[str, Any], name: str | None = None) -> str:
        """Puts a copy of a notebook, a file or nbformat's dictionary, where the server sees it.

        Returns:
            its path below the server's root, as ``Lab.open`` takes it.
        """
        if isinstance(notebook, Path):
            name = name or notebook.name
            shutil.copy(notebook, self.root / name)
        else:
            name = name or f"{secrets.token_hex(4)}.ipynb"
            # Without a kernel's name the page asks for one and waits.
            metadata = {"kernelspec": KERNELSPEC, **notebook["metadata"]}
            (self.root / name).write_text(json.dumps({**notebook, "metadata": metadata}))
        return name

    def trust(self, path: str) -> None:
        command = [sys.executable, "-m", "jupyter", "trust", str(self.root / path)]
        subprocess.run(command, env=os.environ | self.env, check=True, timeout=60)


class Lab:
    """One notebook, open in one page.

    Cells are counted from 0, markdown included. All waiting has a deadline in seconds.

    Attributes:
        page: Playwright's page, for what is not offered here.
        complaints: what the page wrote to its console as errors, and what it raised.
    """

    def __init__(self, page: Page, server: Server) -> None:
        self.page = page
        self.server = server
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "console",
            lambda line: self.complaints.append(line.text) if line.type == "error" else None,
        )

    def open(self, path: str, timeout: float = 120, tree: str = "lab/tree") -> Self:
        """Opens a notebook below the server's root; returns once its kernel is idle.

        ``tree`` is ``notebooks`` for Notebook 7.
        """
        self.page.goto(f"{self.server.url}/{tree}/{path}?reset&token={self.server.token}")
        self._wait("() => window.jupyterapp?.shell?.currentWidget?.sessionContext", timeout)
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=1000 * timeout)
        self._wait(
            """() => {
                const kernel = jupyterapp.shell.currentWidget.sessionContext.session?.kernel;
                return kernel?.connectionStatus === "connected" && kernel.status === "idle";
            }""",
            timeout,
        )
        return self

    def open_without_kernel(self, path: str, timeout: float = 120, trusted: bool = False) -> Self:
        """Opens a notebook as a reader who runs nothing: no kernel is started for it."""
        # The name and the language of no kernel, and the question for another one declined.
        file = self.server.root / path
        notebook = json.loads(file.read_text())
        # What was changed on the way is trusted no more.
        spec = {"name": "none", "display_name": "none", "sent_by": secrets.token_hex(4)}
        notebook["metadata"] = {"kernelspec": spec}
        file.write_text(json.dumps(notebook))
        if trusted:
            self.server.trust(path)
        self.page.goto(f"{self.server.url}/lab/tree/{path}?reset&token={self.server.token}")
        self.page.locator(".jp-Dialog").get_by_role("button", name="No Kernel").click(
            timeout=1000 * timeout
        )
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=1000 * timeout)
        return self

    def run_all(self) -> None:
        """Starts all cells; does not wait for them."""
        self.command("notebook:run-all-cells")

    def start_ranks(self) -> None:
        """Runs the first cell, which starts them; returns when they are there."""
        self.run_cell(0)
        self.wait_for(0, "allranks started")
        self.wait_idle()

    def run_cell(self, index: int) -> None:
        """Starts one cell; does not wait for it."""
        self.page.evaluate(
            """index => { jupyterapp.shell.currentWidget.content.activeCellIndex = index; }""",
            index,
        )
        self.command("notebook:run-cell")

    def write(self, index: int, source: str) -> None:
        self.page.evaluate(
            """([index, source]) => {
                const cell = jupyterapp.shell.currentWidget.content.widgets[index];
                cell.model.sharedModel.setSource(source);
            }""",
            [index, source],
        )

    def replace(self, index: int, source: str) -> None:
        """Writes a cell into a notebook without outputs."""
        self.command("notebook:clear-all-cell-outputs")
        self.write(index, source)
        self.output(index).locator(".jp-OutputArea-child").first.wait_for(state="detached")

    def interrupt(self) -> None:
        self.command("notebook:interrupt-kernel")

    def save(self) -> Path:
        self.page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")
        path = self.page.evaluate("() => jupyterapp.shell.currentWidget.context.path")
        return self.server.root / str(path)

    def close(self) -> None:
        """Ends the notebook's kernel, where it has one, so that it does not outlive its page."""
        self.page.evaluate(
            """() => {
                const context = window.jupyterapp?.shell?.currentWidget?.sessionContext;
                return context?.session?.kernel ? context.shutdown() : null;
            }"""
        )

    def command(self, name: str) -> None:
        self.page.evaluate("name => { void jupyterapp.commands.execute(name); }", name)

    def wait_idle(self, timeout: float = 120) -> None:
        # A cell that has just been started may not have its star yet: ask twice in a row.
        self._wait(
            """() => {
                const prompts = [...document.querySelectorAll(".jp-InputPrompt")];
                const kernel = jupyterapp.shell.currentWidget.sessionContext.session?.kernel;
                const idle = kernel?.status === "idle"
                    && !prompts.some(prompt => prompt.textContent.includes("*"));
                window.idleSeen = idle ? (window.idleSeen ?? 0) + 1 : 0;
                if (window.idleSeen < 3) return false;
                window.idleSeen = 0;
                return true;
            }""",
            timeout,
            polling=50,
        )
        self.wait_painted()

    def wait_painted(self) -> None:
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def output(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-OutputArea")

    def outputs_text(self, index: int) -> str:
        area = self.output(index)
        return "\n".join(area.all_inner_texts()).strip()

    def wait_for(self, index: int, text: str, timeout: float = 120) -> None:
        """Returns once ``text`` stands in a cell's output, whether or not the cell has ended."""
        self.output(index).get_by_text(text).first.wait_for(timeout=1000 * timeout)

    def wait_drawn(self, canvas: Locator, timeout: float = 120) -> None:
        self.page.wait_for_function(
            """c => c.getContext("2d").getImageData(0, 0, c.width, c.height)
                .data.some(value => value > 0)""",
            arg=canvas.element_handle(),
            timeout=1000 * timeout,
        )

    def choose_theme(self, theme: str, timeout: float = 120) -> None:
        """Changes JupyterLab's theme, as ``JupyterLab Dark``; returns once the page has it."""
        self.page.evaluate(
            "theme => jupyterapp.commands.execute('apputils:change-theme', { theme })", theme
        )
        self.page.wait_for_function(
            "theme => document.body.dataset.jpThemeName === theme",
            arg=theme,
            timeout=1000 * timeout,
        )
        # Its colours are there once nothing covers the page, and none is on its way to another.
        self._wait(
            """() => !document.getElementById("jupyterlab-splash")
                && !document.getAnimations().some(one => one instanceof CSSTransition)""",
            timeout,
        )

    def screenshot(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)
        return path

    def _wait(self, condition: str, timeout: float, polling: float | None = None) -> None:
        self.page.wait_for_function(condition, timeout=1000 * timeout, polling=polling)
